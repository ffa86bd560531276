// The page: an image or an item of the index goes in, similar items come out.

import { Filters } from "/filters.js";
import { MapView, classColour } from "/map.js";
import { Proxies } from "/proxies.js";

const $ = (id) => document.getElementById(id);
const state = { info: null, map: null, view: null, query: null, shown: [], filters: null, only: null, token: sessionStorage.getItem("token") || "" };
let turn = 0; // of the newest search; older answers are dropped

/** Ask the service; an error becomes an exception with the sentence of the service. */
async function ask(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (state.token) headers.Authorization = `Bearer ${state.token}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The service does not answer. Is it still running?");
  }
  if (answer.status === 401) {
    await askForToken();
    return ask(path, options);
  }
  if (!answer.ok) {
    let sentence = `The service answered with the error ${answer.status}.`;
    try { sentence = (await answer.json()).error.message; } catch { /* not the service itself, such as a proxy */ }
    throw new Error(sentence);
  }
  return answer;
}

function askForToken() {
  const dialog = $("login");
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    $("login-form").addEventListener("submit", () => {
      state.token = $("token").value;
      sessionStorage.setItem("token", state.token);
      resolve();
    }, { once: true });
  });
}

/** Show a picture of the service; with a token it cannot be loaded by its address alone. */
async function show(image, path) {
  if (!state.token) { image.src = path; return; }
  const blob = await (await ask(path)).blob();
  image.src = URL.createObjectURL(blob);
  image.onload = () => URL.revokeObjectURL(image.src);
}

function say(text) { $("status").textContent = text; }

function fail(error) {
  $("error").textContent = error ? error.message : "";
  $("error").hidden = !error;
}

const PLURALS = { class: "classes", proxy: "proxies" };
const plural = (number, word) => `${number.toLocaleString("en")} ${number === 1 ? word : PLURALS[word] || `${word}s`}`;

/** Search by the current query, which is a file or an item; `more` adds the next page to what is shown. */
async function search(more = false) {
  const query = state.query, mine = ++turn;
  if (!query) return;
  fail(null);
  document.body.classList.add("busy");
  say(`Searching for images similar to ${query.name} …`);
  const only = $("class").value, onePer = $("one-per").value, started = performance.now();
  const where = { ...(state.filters && state.filters.where()), ...(only && { class: only }) };
  const fields = { k: Number($("count").value), offset: more ? state.next : 0, ...(onePer && { one_per: onePer }) };
  $("filter-count").textContent = state.filters && Object.keys(state.filters.where()).length ? `(${Object.keys(state.filters.where()).length})` : "";
  try {
    let options;
    if (query.file) {
      const form = new FormData();
      form.set("image", query.file);
      for (const [name, value] of Object.entries(fields)) form.set(name, value);
      form.set("where", JSON.stringify(where));
      options = { method: "POST", body: form };
    } else {
      const body = JSON.stringify({ id: query.item.id, where, ...fields });
      options = { method: "POST", body, headers: { "Content-Type": "application/json" } };
    }
    const page = await (await ask("/search", options)).json();
    if (mine !== turn) return;
    $("results-heading").textContent = "Results";
    // The index may have changed since the page before, so that a result comes again.
    const known = new Set(more ? state.shown.map((hit) => hit.id) : []);
    const results = [...(more ? state.shown : []), ...page.results.filter((hit) => !known.has(hit.id))];
    state.shown = results; state.next = fields.offset + fields.k;
    $("more").hidden = !page.more;
    list(results, query.item ? query.item.class : null);
    if (more) $("results").children[known.size]?.querySelector("button").focus();
    const right = query.item && query.item.class ? results.filter((hit) => hit.class === query.item.class).length : null;
    say(`${plural(results.length, "result")} for ${query.name}${right === null ? "" : `, ${right} of class ${query.item.class}`}` +
      ` (${Math.round(performance.now() - started)} ms)`);
    await Promise.all([markOnMap(results), more ? null : identify(query, mine)]);
  } catch (error) {
    if (mine !== turn) return;
    say("");
    fail(error);
  } finally {
    if (mine === turn) document.body.classList.remove("busy");
  }
}

/** Say above the results which class the image is, or none; an index without classes says nothing. */
async function identify(query, mine) {
  const line = $("answer");
  line.hidden = true; // what it says is about the image before
  if (!query.file) return;
  try {
    const form = new FormData();
    form.set("image", query.file);
    const answer = await (await ask("/identify", { method: "POST", body: form })).json();
    if (mine !== turn) return;
    const doubt = !answer.has_uncertainty ? ""
      : answer.uncertainty === null ? ", no uncertainty: a new class" : `, uncertainty ${answer.uncertainty.toPrecision(3)}`;
    const digits = [3, 4, 5, 6].find((n) => answer.score.toFixed(n) !== answer.threshold.toFixed(n)) ?? 7; // tell them apart
    const score = `score ${answer.score.toFixed(digits)}, threshold ${answer.threshold.toFixed(digits)}${doubt}`;
    line.textContent = answer.class === null
      ? `This is: none of these (closest: ${answer.best}, ${score})`
      : `This is: ${answer.class} (${score}${answer.runner_up ? `, then ${answer.runner_up}` : ""})`;
    line.hidden = false;
  } catch { /* the line stays hidden */ }
}

function list(items, queryClass) {
  $("results").replaceChildren(...items.map((item, number) => {
    const entry = document.createElement("li"), button = document.createElement("button"), frame = document.createElement("div");
    const image = document.createElement("img"), name = document.createElement("span");
    frame.className = "frame"; name.className = "name";
    image.alt = ""; image.loading = "lazy"; image.decoding = "async";
    show(image, item.thumbnail).catch(fail);
    name.textContent = item.class || item.id; button.title = item.id; button.type = "button";
    frame.append(image); button.append(frame, name);
    let words = `${item.rank ? `Result ${item.rank}` : `Image ${number + 1}`}: ${item.class ? `class ${item.class}, ` : ""}${item.id}`;
    if (item.similarity !== undefined) {
      const meter = document.createElement("span"), bar = document.createElement("span"), fill = document.createElement("i");
      meter.className = "meter"; bar.className = "bar";
      fill.style.width = `${100 * Math.max(0, item.similarity)}%`;
      meter.title = "cosine similarity"; bar.append(fill); meter.append(bar, item.similarity.toFixed(2)); button.append(meter);
      words += `, similarity ${item.similarity.toFixed(2)}`;
    }
    if (queryClass && item.class) {
      const right = item.class === queryClass, mark = document.createElement("span");
      entry.className = right ? "right" : "wrong"; mark.className = "mark"; mark.textContent = right ? "✓" : "✗";
      frame.append(mark);
      words += right ? ", right" : ", wrong";
    }
    button.setAttribute("aria-label", `${words}. Search for this image.`);
    button.addEventListener("click", () => choose(item));
    entry.append(button);
    return entry;
  }));
}

/** Search for an item of the index. */
function choose(item) {
  const hash = `#${encodeURIComponent(item.id)}`;
  if (location.hash === hash) { take({ item, name: item.id }); return; }
  location.hash = hash; // the search follows from the change, and Back returns to the search before
}

async function fromHash() {
  const id = decodeURIComponent(location.hash.slice(1));
  if (!id) return;
  try {
    const item = await (await ask(`/items/${encodeURIComponent(id)}`)).json();
    take({ item, name: item.id });
  } catch (error) { fail(error); }
}

/** Make an image or an item the query, and search. */
function take(query) {
  state.query = query;
  const preview = $("preview");
  preview.hidden = false;
  preview.alt = `The query: ${query.name}`;
  if (query.file) {
    if (location.hash) history.pushState(null, "", location.pathname);
    preview.src = URL.createObjectURL(query.file);
  } else show(preview, query.item.thumbnail).catch(fail);
  $("hint").textContent = query.item && query.item.class ? `${query.name} (class ${query.item.class})` : query.name;
  search();
}

function takeFile(file) {
  if (!file) return;
  if (!file.type.startsWith("image/")) { fail(new Error(`${file.name}: this is not an image.`)); return; }
  if (state.info && file.size > state.info.limits.bytes) {
    fail(new Error(`${file.name}: the file has ${(file.size / 1e6).toFixed(1)} MB, at most ${(state.info.limits.bytes / 1e6).toFixed(1)} MB are possible.`));
    return;
  }
  take({ file, name: file.name || "the photo" });
}

function listenToFiles() {
  const drop = $("drop");
  $("choose").addEventListener("click", () => $("file").click());
  for (const id of ["file", "capture"]) $(id).addEventListener("change", (event) => { takeFile(event.target.files[0]); event.target.value = ""; });
  addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) drop.classList.remove("over"); });
  addEventListener("drop", (event) => { event.preventDefault(); drop.classList.remove("over"); takeFile(event.dataTransfer.files[0]); });
  addEventListener("paste", (event) => { const file = [...event.clipboardData.files][0]; if (file) takeFile(file); });
  for (const id of ["count", "class", "one-per"]) $(id).addEventListener("change", () => search());
  $("more").addEventListener("click", () => search(true));
  $("clear").addEventListener("click", () => { state.filters.clear(); search(); });
  $("photograph").addEventListener("click", photograph);
}

/** Take a photo: phones have an app for it, other devices show the camera here. */
async function photograph() {
  if (matchMedia("(pointer: coarse)").matches || !navigator.mediaDevices) { $("capture").click(); return; }
  const dialog = $("camera"), video = $("video");
  try {
    video.srcObject = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch { fail(new Error("The camera cannot be used. Choose an image instead.")); return; }
  await video.play();
  dialog.showModal();
  $("shoot").onclick = () => {
    const canvas = document.createElement("canvas");
    canvas.width = video.videoWidth; canvas.height = video.videoHeight;
    canvas.getContext("2d").drawImage(video, 0, 0);
    canvas.toBlob((blob) => { dialog.close(); takeFile(new File([blob], "your photo", { type: "image/jpeg" })); }, "image/jpeg", 0.92);
  };
  $("cancel").onclick = () => dialog.close();
  dialog.onclose = () => { for (const track of video.srcObject.getTracks()) track.stop(); };
}

const rows = new Map(); // row -> item, of the points that were looked at
const rowOf = new Map(); // id -> row

async function itemAt(row) {
  if (!rows.has(row)) {
    const item = await (await ask(`/rows/${row}`)).json();
    rows.set(row, item); rowOf.set(item.id, row);
  }
  return rows.get(row);
}

async function startMap() {
  let info;
  try { info = await (await ask("/map")).json(); } catch { $("atlas").parentElement.classList.add("mapless"); return; }
  const points = new Float32Array(await (await ask("/map/points")).arrayBuffer());
  state.map = info;
  listClasses(info.classes);
  $("atlas").hidden = false;
  let turnOfTip = 0;
  try {
    state.view = new MapView($("map"), points, {
      onPick: (row) => itemAt(row).then(choose, fail),
      onHover: async (row) => {
        const mine = ++turnOfTip, tip = $("tip");
        if (row < 0) { tip.hidden = true; return; }
        const item = await itemAt(row).catch(() => null); // the service has stopped, or has another state of the index
        if (mine !== turnOfTip || !item) return;
        const [x, y] = state.view.toScreen(row), stage = state.view.size;
        $("tip-text").textContent = item.class || item.id;
        $("map-status").textContent = `${item.class ? `class ${item.class}, ` : ""}${item.id}`;
        show($("tip-image"), item.thumbnail).catch(() => {});
        const left = x + 164 > stage.width ? x - 164 : x + 16, top = Math.min(Math.max(8, y - 60), stage.height - 170);
        tip.style.transform = `translate(${Math.max(4, left)}px, ${top}px)`;
        tip.hidden = false;
      },
      onProxy: (number) => {
        const name = $("proxy-name"), proxy = number < 0 ? null : state.view.proxies.list[number];
        name.hidden = !proxy;
        if (!proxy) return;
        const [x, y] = state.view.screenOf(proxy.x, proxy.y);
        name.textContent = $("map-status").textContent = `proxy of class ${proxy.class}`;
        name.style.transform = `translate(max(4px, calc(${x}px - 50%)), ${Math.max(4, y - 40)}px)`;
      },
    });
  } catch (error) { $("stage").textContent = error.message; return; }
  window.searchMap = state.view;
  $("map").setAttribute("aria-label", `Map of the index: ${plural(info.count, "image")} of ${plural(info.classes.length, "class")}`);
  $("zoom").addEventListener("click", (event) => {
    const kind = event.target.dataset.zoom;
    if (kind === "all") state.view.fit(); else if (kind) state.view.zoomBy(kind === "in" ? 1.6 : 1 / 1.6);
  });
  showProxies(info).catch(fail); // they may take seconds the first time; nothing waits for them
}

/** Draw the proxies of the run, if it has some, with a legend that is also the switch. */
async function showProxies(info) {
  const { proxies, total, generation } = await (await ask("/map/proxies")).json();
  if (!proxies.length || generation !== info.generation) return;
  state.view.proxies = new Proxies(state.view, proxies, info.classes);
  const box = $("show-proxies");
  $("proxy-count").textContent = total > proxies.length ? `${proxies.length.toLocaleString("en")} of ${plural(total, "proxy")}` : plural(total, "proxy");
  $("gaussian").hidden = !state.view.proxies.gaussian;
  $("proxies").hidden = $("proxy-key").hidden = false;
  box.addEventListener("change", () => state.view.proxies.toggle(box.checked));
  state.view.onToggle = () => { box.checked = !box.checked; state.view.proxies.toggle(box.checked); };
  mark();
  state.view.redraw();
}

/** Offer a filter for each column, and one result for each value of it. */
function listColumns(columns) {
  if (!columns.length) return;
  state.filters = new Filters($("filter-fields"), columns, () => search());
  $("filters").hidden = $("one-per-label").hidden = false;
  $("one-per").append(...columns.map(({ name }) => new Option(name, name)));
}

function listClasses(classes) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  if (!classes.length) { $("legend").hidden = true; return; }
  $("class-label").hidden = $("one-per-label").hidden = false;
  $("one-per").append(new Option("class", "class"));
  $("class").append(...classes.map((name) => new Option(name, name)));
  $("classes").replaceChildren(...classes.map((name, code) => {
    const entry = document.createElement("li"), button = document.createElement("button"), dot = document.createElement("i");
    const colour = () => { dot.style.background = `rgb(${classColour(code, dark.matches)})`; };
    colour(); dark.addEventListener("change", colour);
    button.type = "button"; button.setAttribute("aria-pressed", "false");
    button.append(dot, name);
    button.addEventListener("click", () => {
      state.only = state.only === code ? null : code;
      for (const other of $("classes").querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button && state.only !== null));
      mark();
    });
    entry.append(button);
    return entry;
  }));
}

let marked = { query: -1, results: [] };
function mark() { if (state.view) state.view.mark({ ...marked, only: state.only }); }

/** Emphasise the results on the map; the service says which points they are. */
async function markOnMap(results) {
  if (!state.view) return;
  const find = async (id) => {
    if (!rowOf.has(id)) rowOf.set(id, (await (await ask(`/items/${encodeURIComponent(id)}`)).json()).row);
    return rowOf.get(id);
  };
  const item = state.query && state.query.item;
  marked = { results: results.map((hit) => hit.row), query: item ? await find(item.id) : -1 };
  mark();
}

async function suggest() {
  if (location.hash || !state.info.count) return;
  const wanted = new Set();
  while (wanted.size < Math.min(12, state.info.count)) wanted.add(Math.floor(Math.random() * state.info.count));
  const items = await Promise.all([...wanted].map(itemAt));
  if (!state.query) { $("results-heading").textContent = "Some images of the index"; list(items, null); }
}

async function start() {
  listenToFiles();
  addEventListener("hashchange", fromHash);
  try {
    state.info = await (await ask("/info")).json();
    listColumns(state.info.columns);
    $("facts").textContent = `${plural(state.info.count, "image")}, ${state.info.dim} dimensions`;
    await Promise.all([suggest(), startMap()]);
    $("facts").textContent += state.map && state.map.classes.length ? `, ${state.map.classes.length} classes` : "";
    await fromHash();
  } catch (error) { fail(error); }
  document.body.dataset.ready = "yes";
}

start();
