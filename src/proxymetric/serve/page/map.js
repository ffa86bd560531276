// The map of the index: all points in one draw call of WebGL, with pan, zoom and picking.

const VERTEX = `
attribute vec2 place;
attribute vec3 colour;
attribute float state;
uniform vec2 scale;
uniform vec2 centre;
uniform float size;
uniform float faint;
varying vec4 shade;
varying float ring;
void main() {
  gl_Position = vec4((place - centre) * scale, 0.5 - 0.25 * state, 1.0);
  gl_PointSize = size * (state > 1.5 ? 2.6 : state > 0.5 ? 1.9 : 1.0) + (state > 0.5 ? 4.0 : 0.0);
  shade = vec4(colour, state < -0.5 ? 0.10 : state > 0.5 ? 1.0 : faint);
  ring = state > 0.5 ? 1.0 : 0.0;
}`;
const FRAGMENT = `
precision mediump float;
uniform vec3 ink;
varying vec4 shade;
varying float ring;
void main() {
  float r = length(gl_PointCoord - 0.5) * 2.0;
  if (r > 1.0) discard;
  gl_FragColor = ring > 0.5 && r > 0.72 ? vec4(ink, 1.0) : shade;
}`;
const CELLS = 96; // of the grid that finds the point under the pointer, on each side
const MAX_FRAMES = 2000;

/** The colour of a class: around the colour circle, neighbours far apart. */
export function classColour(code, dark) {
  if (code < 0) return dark ? [150, 156, 168] : [120, 126, 138];
  const hue = ((code * 0.381966) % 1) * 6, light = (dark ? 0.64 : 0.43) + 0.06 * (code % 2), chroma = 0.62 * (1 - Math.abs(2 * light - 1));
  const second = chroma * (1 - Math.abs((hue % 2) - 1)), base = light - chroma / 2;
  const rgb = [[chroma, second, 0], [second, chroma, 0], [0, chroma, second], [0, second, chroma], [second, 0, chroma], [chroma, 0, second]];
  return rgb[Math.floor(hue)].map((part) => Math.round(255 * (part + base)));
}

/** Compile and link shaders; their attributes get numbers from `first` on. */
export function makeProgram(gl, vertex, fragment, attributes, first = 0) {
  const program = gl.createProgram();
  for (const [kind, text] of [[gl.VERTEX_SHADER, vertex], [gl.FRAGMENT_SHADER, fragment]]) {
    const shader = gl.createShader(kind);
    gl.shaderSource(shader, text); gl.compileShader(shader); gl.attachShader(program, shader);
  }
  attributes.forEach((name, number) => gl.bindAttribLocation(program, first + number, name));
  gl.linkProgram(program);
  if (!gl.getProgramParameter(program, gl.LINK_STATUS) && !gl.isContextLost()) throw new Error(`the map cannot be drawn: ${gl.getProgramInfoLog(program)}`);
  return program;
}

export class MapView {
  /** points: Float32Array of x, y, class for each item, in the square from -1 to 1. */
  constructor(canvas, points, { onHover, onPick, onProxy }) {
    this.canvas = canvas; this.points = points; this.count = points.length / 3;
    this.onToggle = () => {}; // of the proxies, by key
    this.onHover = onHover; this.onPick = onPick; this.onProxy = onProxy;
    this.proxies = null; this.hoveredProxy = -1; // drawn above the points, in a draw call of their own
    this.centre = [0, 0]; this.zoom = 1; this.hovered = -1;
    this.frames = []; this.spent = 0; // script time of each frame in ms: drawing, and the handlers of events before it
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.gl = canvas.getContext("webgl", { antialias: true, alpha: true, preserveDrawingBuffer: true });
    if (!this.gl) throw new Error("the map needs WebGL, which this browser does not offer");
    this._prepare(); this._grid(); this._listen();
    this.fit();
  }

  _prepare() {
    const gl = this.gl;
    this.program = makeProgram(gl, VERTEX, FRAGMENT, ["place", "colour", "state"]);
    this.uniforms = Object.fromEntries(["scale", "centre", "size", "faint", "ink"].map((name) => [name, gl.getUniformLocation(this.program, name)]));
    const buffer = (number, data, width, type, normal, stride) => {
      const made = gl.createBuffer();
      gl.bindBuffer(gl.ARRAY_BUFFER, made); gl.bufferData(gl.ARRAY_BUFFER, data, gl.DYNAMIC_DRAW);
      gl.enableVertexAttribArray(number); gl.vertexAttribPointer(number, width, type, normal, stride, 0);
      return made;
    };
    buffer(0, this.points, 2, gl.FLOAT, false, 12);
    this.colours = new Uint8Array(4 * this.count); this.states = new Float32Array(this.count);
    this.colourBuffer = buffer(1, this.colours, 3, gl.UNSIGNED_BYTE, true, 4);
    this.stateBuffer = buffer(2, this.states, 1, gl.FLOAT, false, 0);
    gl.enable(gl.BLEND); gl.blendFunc(gl.SRC_ALPHA, gl.ONE_MINUS_SRC_ALPHA);
    gl.enable(gl.DEPTH_TEST); gl.depthFunc(gl.LEQUAL);
    this._colour();
    this.dark.addEventListener("change", () => this._colour());
  }

  _colour() {
    const table = new Map();
    for (let i = 0; i < this.count; i++) {
      const code = this.points[3 * i + 2];
      if (!table.has(code)) table.set(code, classColour(code, this.dark.matches));
      this.colours.set(table.get(code), 4 * i);
    }
    this.gl.bindBuffer(this.gl.ARRAY_BUFFER, this.colourBuffer);
    this.gl.bufferSubData(this.gl.ARRAY_BUFFER, 0, this.colours);
    this.redraw();
  }

  /** Emphasise rows: the query, results, and one class (others become faint); null clears. */
  mark({ query = -1, results = [], only = null }) {
    for (let i = 0; i < this.count; i++) this.states[i] = only !== null && this.points[3 * i + 2] !== only ? -1 : 0;
    for (const row of results) if (row >= 0) this.states[row] = 1;
    if (query >= 0) this.states[query] = 2;
    if (this.proxies) this.proxies.mark(only);
    this.gl.bindBuffer(this.gl.ARRAY_BUFFER, this.stateBuffer);
    this.gl.bufferSubData(this.gl.ARRAY_BUFFER, 0, this.states);
    this.redraw();
  }

  _grid() {
    const cell = (value) => Math.min(CELLS - 1, Math.max(0, Math.floor((value + 1) / 2 * CELLS)));
    this.cell = cell;
    const starts = new Uint32Array(CELLS * CELLS + 1), rows = new Uint32Array(this.count);
    const of = (i) => cell(this.points[3 * i + 1]) * CELLS + cell(this.points[3 * i]);
    for (let i = 0; i < this.count; i++) starts[of(i) + 1]++;
    for (let i = 0; i < CELLS * CELLS; i++) starts[i + 1] += starts[i];
    const next = starts.slice();
    for (let i = 0; i < this.count; i++) rows[next[of(i)]++] = i;
    this.cells = { starts, rows };
  }

  /** The size of the canvas. Asking the browser makes it lay out the page, so that it is asked only after a change. */
  get size() { return this._size ||= this.canvas.getBoundingClientRect(); }

  get scale() {
    const { width, height } = this.size, side = Math.min(width, height) / 2 * 0.94;
    return [this.zoom * side, width, height];
  }

  toMap(x, y) {
    const [scale, width, height] = this.scale;
    return [this.centre[0] + (x - width / 2) / scale, this.centre[1] - (y - height / 2) / scale];
  }

  toScreen(row) { return this.screenOf(this.points[3 * row], this.points[3 * row + 1]); }

  screenOf(x, y) {
    const [scale, width, height] = this.scale;
    return [width / 2 + (x - this.centre[0]) * scale, height / 2 - (y - this.centre[1]) * scale];
  }

  /** The row of the point nearest to a place on the screen, within some pixels; -1 if there is none. */
  nearest(x, y, pixels = 14) {
    const [mx, my] = this.toMap(x, y), reach = pixels / this.scale[0];
    let best = -1, least = reach * reach;
    for (let cy = this.cell(my - reach); cy <= this.cell(my + reach); cy++)
      for (let cx = this.cell(mx - reach); cx <= this.cell(mx + reach); cx++) {
        const place = cy * CELLS + cx;
        for (let n = this.cells.starts[place]; n < this.cells.starts[place + 1]; n++) {
          const i = this.cells.rows[n], dx = this.points[3 * i] - mx, dy = this.points[3 * i + 1] - my, d = dx * dx + dy * dy;
          if (d < least) { least = d; best = i; }
        }
      }
    return best;
  }

  fit() { this.centre = [0, 0]; this.zoom = 1; this.redraw(); }

  zoomAt(factor, x, y) {
    const before = this.toMap(x, y);
    this.zoom = Math.min(400, Math.max(0.5, this.zoom * factor));
    const after = this.toMap(x, y);
    this.centre[0] += before[0] - after[0]; this.centre[1] += before[1] - after[1];
    this.redraw();
  }

  zoomBy(factor) { const [, width, height] = this.scale; this.zoomAt(factor, width / 2, height / 2); }

  pan(dx, dy) {
    const [scale] = this.scale;
    const limit = (value) => Math.min(1.2, Math.max(-1.2, value));
    this.centre = [limit(this.centre[0] - dx / scale), limit(this.centre[1] + dy / scale)];
    this.redraw();
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this._draw(); });
  }

  _draw() {
    const started = performance.now(), gl = this.gl, [scale, width, height] = this.scale;
    const ratio = Math.min(2, devicePixelRatio || 1), w = Math.round(width * ratio), h = Math.round(height * ratio);
    if (!w || !h) return;
    if (this.canvas.width !== w || this.canvas.height !== h) { this.canvas.width = w; this.canvas.height = h; }
    gl.viewport(0, 0, w, h);
    gl.clearColor(0, 0, 0, 0); gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT);
    gl.useProgram(this.program);
    gl.uniform2f(this.uniforms.scale, 2 * scale / width, 2 * scale / height);
    gl.uniform2f(this.uniforms.centre, this.centre[0], this.centre[1]);
    const crowd = Math.min(1, Math.sqrt(2500 / Math.max(1, this.count)));
    gl.uniform1f(this.uniforms.size, ratio * Math.min(13, (3 + 5 * crowd) * Math.pow(this.zoom, 0.25)));
    gl.uniform1f(this.uniforms.faint, 0.55 + 0.35 * crowd);
    const ink = this.dark.matches ? [1, 1, 1] : [0.06, 0.07, 0.1];
    gl.uniform3f(this.uniforms.ink, ...ink);
    gl.drawArrays(gl.POINTS, 0, this.count);
    if (this.proxies) this.proxies.draw({ scale, width, height, ratio, centre: this.centre, ink });
    if (this.frames.length < MAX_FRAMES) this.frames.push(performance.now() - started + this.spent);
    this.spent = 0;
  }

  _listen() {
    const pointers = new Map(), canvas = this.canvas;
    let moved = 0;
    const place = (event) => [event.offsetX, event.offsetY];
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId); pointers.set(event.pointerId, place(event)); moved = 0;
      canvas.classList.add("dragging");
    });
    const timed = (handle) => (event) => { const started = performance.now(); handle(event); this.spent += performance.now() - started; };
    canvas.addEventListener("pointermove", timed((event) => {
      const [x, y] = place(event), before = pointers.get(event.pointerId);
      if (!before) { this._hover(x, y); return; }
      if (pointers.size === 1) this.pan(x - before[0], y - before[1]);
      else {
        const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
        const span = (p) => Math.hypot(p[0] - other[0], p[1] - other[1]);
        if (span(before) > 0) this.zoomAt(span([x, y]) / span(before), (x + other[0]) / 2, (y + other[1]) / 2);
      }
      moved += Math.hypot(x - before[0], y - before[1]);
      pointers.set(event.pointerId, [x, y]);
      if (moved > 4) this.onHover(-1);
    }));
    const end = (event) => {
      const [x, y] = place(event), was = pointers.delete(event.pointerId);
      if (!pointers.size) canvas.classList.remove("dragging");
      if (was && event.type === "pointerup" && moved < 6) {
        const row = this.nearest(x, y, event.pointerType === "touch" ? 24 : 14);
        if (row >= 0) this.onPick(row);
      }
    };
    canvas.addEventListener("pointerup", end);
    canvas.addEventListener("pointercancel", end);
    canvas.addEventListener("pointerleave", () => { this.hovered = this.hoveredProxy = -1; this.onHover(-1); this.onProxy(-1); });
    canvas.addEventListener("wheel", timed((event) => {
      event.preventDefault();
      const [x, y] = place(event), lines = event.deltaMode ? 24 : 1;
      this.zoomAt(Math.exp(-event.deltaY * lines * 0.0016), x, y);
      this._hover(x, y);
    }), { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const step = 60, keys = {
        ArrowLeft: () => this.pan(step, 0), ArrowRight: () => this.pan(-step, 0), ArrowUp: () => this.pan(0, step), ArrowDown: () => this.pan(0, -step),
        "+": () => this.zoomBy(1.4), "=": () => this.zoomBy(1.4), "-": () => this.zoomBy(1 / 1.4), 0: () => this.fit(), p: () => this.onToggle(),
      };
      const [, width, height] = this.scale;
      if (event.key === "Enter" || event.key === " ") {
        const row = this.nearest(width / 2, height / 2, 60);
        if (row >= 0) this.onPick(row);
      } else if (keys[event.key]) {
        keys[event.key]();
        this._hover(width / 2, height / 2, 60);
      } else return;
      event.preventDefault();
    });
    new ResizeObserver(() => { this._size = null; this.redraw(); }).observe(canvas);
    canvas.addEventListener("webglcontextrestored", () => { this._prepare(); if (this.proxies) this.proxies.prepare(); this.redraw(); });
    canvas.addEventListener("webglcontextlost", (event) => event.preventDefault());
  }

  _hover(x, y, pixels = 14) {
    const row = this.nearest(x, y, pixels), proxy = this.proxies ? this.proxies.nearest(...this.toMap(x, y), 9 / this.scale[0]) : -1;
    this.canvas.classList.toggle("pointing", row >= 0);
    if (proxy !== this.hoveredProxy) {
      this.hoveredProxy = proxy;
      this.onProxy(proxy);
    }
    if (row === this.hovered) return;
    this.hovered = row;
    this.onHover(row);
  }
}
