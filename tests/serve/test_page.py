"""The web page in a real browser: upload, drop, paste, results, map, keyboard, phone, dark mode, token, errors."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import time
from dataclasses import replace

import pytest
import torch

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

import proxymetric as pm
from browser import browser, missing
from proxymetric.search import Index
from proxymetric.system.checkpoint import Checkpoint, module_tensors
from proxymetric.system.files import read_json, write_json
from service import jpeg, serving

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")
WAIT = 30_000
"""milliseconds"""


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


@pytest.fixture
def open_page(chromium, client):
    """Open the page; at the end there must be no error on its console, and no request to anywhere else."""
    contexts, troubles = [], []

    def start(path="/", port=None, **options):
        context = chromium.new_context(viewport=options.pop("viewport", {"width": 1280, "height": 900}), **options)
        context.set_default_timeout(WAIT)
        contexts.append(context)
        page = context.new_page()
        address = f"http://127.0.0.1:{port or client.port}"
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("request", lambda request: None if is_own(request.url, address) else troubles.append(request.url))
        page.goto(f"{address}{path}")
        return page

    yield start
    for context in contexts:
        context.close()
    assert not troubles


def is_own(url, address):
    return url.startswith((address, "blob:", "data:"))


def ready(page):
    page.locator("body[data-ready=yes]").wait_for()
    return page


def status(page, text):
    page.locator("#status", has_text=text).wait_for()


def until(page, expression):
    """Wait until an expression is true; `wait_for_function` would need a page that allows `eval`."""
    end = time.monotonic() + WAIT / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def upload(page, photo):
    page.set_input_files("#file", photo)
    status(page, "results for")


def test_an_upload_shows_results(open_page, photos):
    page = ready(open_page())
    assert page.inner_text("#facts") == "80 images, 8 dimensions, 10 classes"
    assert page.locator("#results li").count() == 12, "some images to start with"
    upload(page, photos / "class5" / "3.png")
    status(page, "12 results for 3.png")
    first = page.locator("#results button").first
    assert first.get_attribute("aria-label") == (
        "Result 1: class class5, class5/3.png, similarity 1.00. Search for this image."
    )
    assert page.locator("#results .mark").count() == 0, "the class of an upload is unknown"
    page.wait_for_selector("#answer:not([hidden])")
    assert page.inner_text("#answer").startswith("This is: ")
    images = "[...document.querySelectorAll('#results img')].slice(0, 3)"
    widths = page.evaluate(f"Promise.all({images}.map((image) => image.decode().then(() => image.naturalWidth)))")
    assert widths == [16, 16, 16], "the thumbnails of small pictures"
    page.select_option("#count", "24")
    status(page, "24 results for")
    page.select_option("#class", "class4")
    status(page, "8 results for")
    labels = page.locator("#results button").evaluate_all("buttons => buttons.map((b) => b.ariaLabel)")
    assert all("class class4" in label for label in labels)


def test_filters_pages_and_one_result_for_each_value(open_page, settings, index_folder, tmp_path, photos):
    copy = shutil.copytree(index_folder, tmp_path / "a.index")
    index = Index(copy)
    metadata = [
        {
            "price": n,
            "added": f"2026-01-{1 + n % 28:02}",
            "brand": "a, b" if n % 2 else "c",
            "code": f"x{n}",
            "tags": ["new", f"t{n % 3}"],
        }
        for n in range(len(index))
    ]
    index.update(index.ids, metadata=metadata)
    with serving(replace(settings, index=str(copy))) as client:
        page = ready(open_page(port=client.port))
        upload(page, photos / "class5" / "3.png")
        page.click("#filters summary")
        assert page.locator(".filter").count() == 5, "no item has the column `shop` any more"
        page.select_option("[aria-label=brand] select", "a, b")
        status(page, "12 results for")
        for shown in (24, 36, 40):
            page.click("#more")
            status(page, f"{shown} results for")
        ids = page.locator("#results button").evaluate_all("buttons => buttons.map((b) => b.title)")
        assert len(set(ids)) == 40
        assert page.is_hidden("#more")
        page.fill("[aria-label='price from']", "10")
        page.fill("[aria-label='price to']", "20")
        page.press("[aria-label='price to']", "Enter")
        status(page, "5 results for")
        assert page.inner_text("#filter-count") == "(2)"
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
            if out := os.environ.get("PROXYMETRIC_TEST_PICTURES"):
                page.screenshot(path=f"{out}/filters-{width}.png", full_page=True)
        page.click("#clear")
        page.fill("[aria-label='added from']", "2026-01-02")
        page.fill("[aria-label='added to']", "2026-01-02")
        page.press("[aria-label='added to']", "Tab")
        status(page, "3 results for")
        page.click("#clear")
        page.select_option("#one-per", "class")
        status(page, "10 results for")
        page.select_option("[aria-label=tags] select", "t2")
        page.select_option("#one-per", "brand")
        status(page, "2 results for")


def test_the_answer_is_that_of_the_image_that_is_shown(open_page, photos, client, tmp_path):
    page = ready(open_page())
    upload(page, photos / "class5" / "3.png")
    page.wait_for_selector("#answer:not([hidden])")
    page.route("**/identify", lambda route: None)  # the second answer never comes
    page.set_input_files("#file", photos / "class4" / "2.png")
    status(page, "results for 2.png")
    assert page.locator("#answer").is_hidden(), "it said what the first image is"
    page.unroute("**/identify")
    grey = tmp_path / "grey.jpg"
    grey.write_bytes(jpeg())
    page.set_input_files("#file", grey)
    status(page, "results for grey.jpg")
    page.wait_for_selector("#answer:not([hidden])")
    body = json.dumps({"image": base64.b64encode(grey.read_bytes()).decode()})
    said = client("POST", "/identify", body, {"content-type": "application/json"}).json
    numbers = f"score {said['score']:.3f}, threshold {said['threshold']:.3f}"
    expected = {
        True: f"This is: none of these (closest: {said['best']}, {numbers})",
        False: f"This is: {said['class']} ({numbers}, then {said['runner_up']})",
    }
    assert page.inner_text("#answer") == expected[said["class"] is None]


def test_an_item_shows_right_and_wrong_and_back_returns(open_page, photos):
    page = ready(open_page())
    upload(page, photos / "class5" / "3.png")
    page.locator("#results button").first.click()
    status(page, "12 results for class5/3.png")
    right, wrong = page.locator("#results .right").count(), page.locator("#results .wrong").count()
    assert right + wrong == 12
    assert f"{right} of class class5" in page.inner_text("#status")
    assert page.url.endswith("#class5%2F3.png")
    page.locator("#results button").nth(4).click()
    page.wait_for_url(re.compile("#(?!class5%2F3.png)"))
    page.go_back()
    status(page, "12 results for class5/3.png")
    again = ready(open_page("/#class2%2F0.png"))
    status(again, "12 results for class2/0.png")


def test_drop_and_paste(open_page):
    page = ready(open_page())
    image = base64.b64encode(jpeg()).decode()
    event = """([kind, text]) => {
      const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)), data = new DataTransfer();
      data.items.add(new File([bytes], `${kind}.jpg`, {type: "image/jpeg"}));
      const target = document.getElementById("drop");
      const options = {bubbles: true, cancelable: true};
      if (kind === "drop") target.dispatchEvent(new DragEvent("drop", {dataTransfer: data, ...options}));
      else target.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, bubbles: true}));
    }"""
    for kind in ("drop", "paste"):
        page.evaluate(event, [kind, image])
        status(page, f"12 results for {kind}.jpg")


def test_a_photo_by_the_camera(open_page):
    page = ready(open_page())
    tracks = "document.getElementById('video').srcObject.getTracks().map((track) => track.readyState)"
    for button in ("#cancel", "#shoot"):
        page.click("#photograph")
        page.locator("#camera").wait_for(state="visible")
        until(page, "document.getElementById('video').videoWidth > 0")
        assert page.evaluate(tracks) == ["live"]
        page.click(button)
        page.locator("#camera").wait_for(state="hidden")
        until(page, f"{tracks}[0] === 'ended'")  # the camera is off
    status(page, "12 results for your photo")
    until(page, "document.getElementById('preview').naturalWidth > 100")  # the photo is the query


def test_without_a_camera_it_is_said(open_page):
    page = ready(open_page())
    page.evaluate("() => { navigator.mediaDevices.getUserMedia = () => Promise.reject(new Error('no camera')); }")
    page.click("#photograph")
    page.locator("#error", has_text="The camera cannot be used. Choose an image instead.").wait_for()


def test_the_map_by_mouse(open_page):
    page = ready(open_page())
    place = """(row) => {
      const box = document.getElementById("map").getBoundingClientRect(), [x, y] = searchMap.toScreen(row);
      return [box.left + x, box.top + y];
    }"""
    page.mouse.move(*page.evaluate(place, 17))
    page.locator("#tip").wait_for(state="visible")
    row = page.evaluate("searchMap.hovered")
    item = page.evaluate("(row) => fetch(`/rows/${row}`).then((answer) => answer.json())", row)
    page.locator("#tip-text", has_text=item["class"]).wait_for()
    page.mouse.click(*page.evaluate(place, row))
    status(page, f"12 results for {item['id']}")
    states = page.evaluate("[...searchMap.states]")
    assert states[row] == 2
    assert states.count(1) == 12
    box = page.locator("#map").bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.move(*middle)
    page.mouse.wheel(0, -600)
    page.wait_for_timeout(100)
    zoom = page.evaluate("searchMap.zoom")
    assert zoom > 1.5
    page.mouse.down()
    page.mouse.move(middle[0] + 80, middle[1] + 40, steps=4)
    page.mouse.up()
    assert page.evaluate("searchMap.centre[0]") != 0
    assert page.inner_text("#status").startswith(f"12 results for {item['id']}"), "a drag is no click"
    page.click("[data-zoom=all]")
    assert page.evaluate("[searchMap.zoom, ...searchMap.centre]") == [1, 0, 0]
    page.click("#legend summary")
    page.click("#classes button >> nth=3")
    assert page.evaluate("[...searchMap.states].filter((state) => state < 0).length") > 0
    assert page.get_attribute("#classes button >> nth=3", "aria-pressed") == "true"


def test_all_points_are_one_draw_call_and_are_seen(open_page):
    page = ready(open_page())
    page.locator("#proxies").wait_for()
    counted = page.evaluate("""async () => {
      const gl = searchMap.gl, original = gl.drawArrays.bind(gl), calls = [];
      gl.drawArrays = (mode, first, count) => { calls.push(count); original(mode, first, count); };
      searchMap.redraw();
      await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
      const pixels = new Uint8Array(4 * gl.drawingBufferWidth * gl.drawingBufferHeight);
      gl.readPixels(0, 0, gl.drawingBufferWidth, gl.drawingBufferHeight, gl.RGBA, gl.UNSIGNED_BYTE, pixels);
      let painted = 0;
      for (let i = 3; i < pixels.length; i += 4) painted += pixels[i] > 0;
      return [calls, painted];
    }""")
    assert counted[0] == [80, 6 * 8], "the points, and a square of two triangles for each proxy"
    assert counted[1] > 80 * 10


@pytest.fixture
def gaussian_run(settings, tmp_path):
    """The run of the index, as if VCPA had trained it."""
    run = tmp_path / "gaussian"
    shutil.copytree(Index.open(settings.index).manifest.run["run"], run)
    description = read_json(run / "run.json")
    description["recipe"] |= {"method": "vcpa", "loss": {}}
    write_json(run / "run.json", description)
    criterion = pm.method("vcpa", classes=len(description["classes"]), dim=8)
    criterion.objective.source.mu.copy_(torch.randn(len(description["classes"]), 8))
    criterion.objective.source.sigma.fill_(0.2)
    for file in run.glob("*.safetensors"):
        checkpoint = Checkpoint.read(file)
        kept = {name: value for name, value in checkpoint.tensors.items() if not name.startswith("criterion.")}
        Checkpoint(kept | module_tensors(criterion, "criterion."), checkpoint.state).write(file)
    return run


def test_the_proxies_on_the_map(open_page, client, settings, gaussian_run):
    """Points and Gaussians; the legend switches them, and so does a key; the mouse tells the name."""
    page = ready(open_page())
    page.locator("#proxies", has_text="8 proxies of the training classes").wait_for()
    assert page.locator("#gaussian").is_hidden()
    assert page.evaluate("searchMap.proxies.codes.every((code) => code >= 0)"), "the colours of their classes"
    with serving(replace(settings, run=str(gaussian_run))) as other:
        page = ready(open_page(port=other.port))
        page.locator("#gaussian", has_text="one standard deviation of a Gaussian proxy").wait_for()
        assert page.evaluate("searchMap.proxies.list.every((proxy) => proxy.radius > 0)")
        painted = """(shown) => {
          const view = searchMap, gl = view.gl, {x, y, radius} = view.proxies.list[4];
          const ratio = view.canvas.width / view.scale[1];
          view.proxies.toggle(shown); view._draw();
          const pixels = new Uint8Array(4), values = [];
          for (const dx of [0, radius * view.scale[0]]) {
            const [left, top] = view.screenOf(x, y);
            const place = [(left + dx) * ratio, view.canvas.height - top * ratio];
            gl.readPixels(...place, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, pixels);
            values.push([...pixels].join());
          }
          return values;
        }"""
        page.evaluate("view = searchMap; view.states.fill(-1); view.zoom = 1")
        with_proxies, without = page.evaluate(painted, True), page.evaluate(painted, False)
        assert with_proxies[0] != without[0], "a diamond in the middle"
        assert with_proxies[1] != without[1], "a circle of that radius"
        page.focus("#show-proxies")
        page.keyboard.press("Space")
        assert not page.evaluate("searchMap.proxies.shown")
        page.focus("#map")
        page.keyboard.press("p")
        assert page.evaluate("searchMap.proxies.shown")
        assert page.is_checked("#show-proxies")
        box, proxy = page.locator("#map").bounding_box(), page.evaluate("searchMap.proxies.list[4]")
        left, top = page.evaluate("({x, y}) => searchMap.screenOf(x, y)", proxy)
        page.mouse.move(box["x"] + left, box["y"] + top)
        hovered = page.evaluate("searchMap.proxies.list[searchMap.hoveredProxy].class")
        assert page.inner_text("#proxy-name") == f"proxy of class {hovered}"


def test_by_keyboard_alone(open_page, photos):
    page = ready(open_page())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
    page.focus("#map")
    for key in ("+", "ArrowLeft", "ArrowUp", "-", "0"):
        page.keyboard.press(key)
    assert page.evaluate("searchMap.zoom") == 1
    # The middle may hold no point: go where one is.
    page.evaluate("searchMap.centre = [searchMap.points[0], searchMap.points[1]]")
    page.keyboard.press("+")
    page.locator("#map-status", has_text="class").wait_for(state="attached")
    page.keyboard.press("Enter")
    status(page, "12 results for")
    page.locator("#results button").nth(2).focus()
    chosen = page.evaluate("document.activeElement.title")
    page.keyboard.press("Enter")
    status(page, f"results for {chosen}")


def test_what_a_screen_reader_needs(open_page, photos):
    page = ready(open_page())
    upload(page, photos / "class5" / "3.png")
    nameless = page.evaluate("""() => {
      const parts = [...document.querySelectorAll("button, select, input:not([hidden]), canvas")];
      const hasName = (part) => part.ariaLabel || part.textContent.trim() || part.labels?.length;
      return parts.filter((part) => part.checkVisibility() && !hasName(part)).map((part) => part.outerHTML);
    }""")
    assert nameless == []
    assert page.evaluate("[...document.images].every((image) => image.hasAttribute('alt'))")
    assert page.get_attribute("html", "lang") == "en"
    assert page.get_attribute("#status", "role") == "status"
    assert page.get_attribute("#preview", "alt") == "The query: 3.png"
    assert page.locator("h1").count() == 1
    assert page.get_attribute("#map", "aria-label") == "Map of the index: 80 images of 10 classes"


def test_no_width_needs_sideways_scrolling(open_page, photos):
    page = ready(open_page(viewport={"width": 320, "height": 800}))
    upload(page, photos / "class5" / "3.png")
    for width in (320, 768, 1920):
        page.set_viewport_size({"width": width, "height": 800})
        until(page, f"innerWidth === {width}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        box = page.locator("#choose").bounding_box()
        assert box["height"] >= 42, "large enough for a finger"


def test_touch_on_a_phone(open_page):
    page = ready(open_page(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True))
    page.locator("#map").scroll_into_view_if_needed()
    box, place = page.locator("#map").bounding_box(), page.evaluate("searchMap.toScreen(30)")
    page.touchscreen.tap(box["x"] + place[0], box["y"] + place[1])
    status(page, "12 results for")


def test_dark_mode(open_page):
    page, colours = ready(open_page(color_scheme="light")), []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colours == ["rgb(246, 247, 249)", "rgb(16, 18, 22)"]


def test_errors_are_said(open_page, photos):
    page = ready(open_page())
    page.set_input_files("#file", {"name": "a.svg", "mimeType": "image/svg+xml", "buffer": b"<svg/>"})
    page.locator("#error", has_text="the image format is not recognised").wait_for()
    page.set_input_files("#file", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"text"})
    page.locator("#error", has_text="a.txt: this is not an image").wait_for()
    page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": bytes(1_500_000)})
    page.locator("#error", has_text="at most 1.0 MB are possible").wait_for()
    upload(page, photos / "class5" / "3.png")
    assert page.locator("#error").is_hidden()


def test_a_token_is_asked_for(open_page, settings):
    with serving(replace(settings, token="secret")) as other:
        page = open_page(port=other.port)
        for token in ("wrong", "secret"):
            page.locator("#login").wait_for(state="visible")
            page.fill("#token", token)
            page.keyboard.press("Enter")
        ready(page)
        assert page.inner_text("#facts").startswith("80 images")
        page.locator("#results img").first.wait_for()
        status(page, "")
        page.locator("#results button").first.click()
        status(page, "12 results for")


def test_nothing_in_names_is_taken_as_html(open_page, settings, tmp_path):
    index = Index.open(settings.index)
    name = '<img src=x onerror="document.title=1">'
    other = Index.create(tmp_path / "x.index", index.dim, index.model, run=index.manifest.run)
    other.add([name, "b"], torch.eye(index.dim)[:2], labels=[name, name], thumbnails=[jpeg(), jpeg()])
    with serving(replace(settings, index=str(other.folder))) as service:
        page = ready(open_page(port=service.port))
        page.locator("#results button").first.click()
        status(page, "1 result for")
        assert page.title() == "Search by image"
        assert name in page.inner_text("#results")
