// The proxies of the run on the map: a diamond for each, and around a Gaussian one a circle of one standard deviation.

import { classColour, makeProgram } from "/map.js";

const VERTEX = `
attribute vec2 spot;
attribute vec2 corner;
attribute float radius;
attribute vec4 tint;
uniform vec2 scale;
uniform vec2 centre;
uniform vec2 pixel;
uniform float stretch;
uniform mediump float mark; // both shaders have it, so that its precision is the same
varying vec2 offset;
varying float ring;
varying vec4 shade;
void main() {
  ring = radius * stretch;
  offset = corner * (max(ring, mark) + 2.0);
  gl_Position = vec4((spot - centre) * scale + offset * pixel, -0.9, 1.0);
  shade = tint;
}`;
const FRAGMENT = `
precision mediump float;
uniform vec3 ink;
uniform float mark;
uniform float line;
varying vec2 offset;
varying float ring;
varying vec4 shade;
void main() {
  float diamond = abs(offset.x) + abs(offset.y), r = length(offset);
  if (diamond < mark - line) gl_FragColor = shade;
  else if (diamond < mark) gl_FragColor = vec4(ink, shade.a);
  else if (abs(r - ring) < 0.6 * line) gl_FragColor = shade;
  else if (r < ring) gl_FragColor = vec4(shade.rgb, 0.10 * shade.a);
  else discard;
}`;
const CORNERS = [[-1, -1], [1, -1], [-1, 1], [-1, 1], [1, -1], [1, 1]];
const VALUES = 5; // of a vertex: place, corner, radius
const FIRST = 3; // attributes 0 to 2 are those of the points
const MARK = 7, SMALL_MARK = 5, MANY = 60; // pixels from the middle of a diamond to its corners; small ones if there are many

export class Proxies {
  /** proxies: class, x, y, radius of each; classes: the classes of the index, whose colours they share. */
  constructor(view, proxies, classes) {
    this.view = view; this.list = proxies; this.shown = true; this.only = null;
    const code = new Map(classes.map((name, number) => [name, number]));
    this.codes = proxies.map((proxy) => code.get(proxy.class) ?? -1);
    this.prepare();
    view.dark.addEventListener("change", () => { this.colour(); view.redraw(); });
  }

  get gaussian() { return this.list.some((proxy) => proxy.radius > 0); }

  prepare() {
    const gl = this.view.gl, count = 6 * this.list.length;
    this.program = makeProgram(gl, VERTEX, FRAGMENT, ["spot", "corner", "radius", "tint"], FIRST);
    this.uniforms = Object.fromEntries(["scale", "centre", "pixel", "stretch", "mark", "line", "ink"].map((name) => [name, gl.getUniformLocation(this.program, name)]));
    const values = new Float32Array(VALUES * count);
    this.list.forEach(({ x, y, radius }, n) => CORNERS.forEach((corner, m) => values.set([x, y, ...corner, radius], VALUES * (6 * n + m))));
    gl.bindBuffer(gl.ARRAY_BUFFER, gl.createBuffer()); gl.bufferData(gl.ARRAY_BUFFER, values, gl.STATIC_DRAW);
    for (const [number, width, start] of [[0, 2, 0], [1, 2, 2], [2, 1, 4]]) {
      gl.enableVertexAttribArray(FIRST + number); gl.vertexAttribPointer(FIRST + number, width, gl.FLOAT, false, 4 * VALUES, 4 * start);
    }
    this.tints = new Uint8Array(4 * count); this.tintBuffer = gl.createBuffer();
    gl.bindBuffer(gl.ARRAY_BUFFER, this.tintBuffer); gl.bufferData(gl.ARRAY_BUFFER, this.tints, gl.DYNAMIC_DRAW);
    gl.enableVertexAttribArray(FIRST + 3); gl.vertexAttribPointer(FIRST + 3, 4, gl.UNSIGNED_BYTE, true, 0, 0);
    this.colour();
  }

  colour() {
    const gl = this.view.gl;
    this.codes.forEach((code, n) => {
      const tint = [...classColour(code, this.view.dark.matches), this.only === null || this.only === code ? 255 : 25];
      for (let m = 0; m < 6; m++) this.tints.set(tint, 4 * (6 * n + m));
    });
    gl.bindBuffer(gl.ARRAY_BUFFER, this.tintBuffer); gl.bufferSubData(gl.ARRAY_BUFFER, 0, this.tints);
  }

  /** Emphasise the proxies of one class; null: all. */
  mark(only) {
    if (only === this.only) return;
    this.only = only;
    this.colour();
  }

  toggle(shown = !this.shown) { this.shown = shown; this.view.redraw(); }

  /** Draw all proxies; the view has set the viewport. */
  draw({ scale, width, height, ratio, centre, ink }) {
    if (!this.shown || !this.list.length) return;
    const gl = this.view.gl, uniforms = this.uniforms;
    gl.useProgram(this.program);
    gl.uniform2f(uniforms.scale, 2 * scale / width, 2 * scale / height);
    gl.uniform2f(uniforms.centre, centre[0], centre[1]);
    gl.uniform2f(uniforms.pixel, 2 / (width * ratio), 2 / (height * ratio));
    gl.uniform1f(uniforms.stretch, scale * ratio);
    gl.uniform1f(uniforms.mark, (this.list.length > MANY ? SMALL_MARK : MARK) * ratio);
    gl.uniform1f(uniforms.line, 2 * ratio);
    gl.uniform3f(uniforms.ink, ...ink);
    gl.drawArrays(gl.TRIANGLES, 0, 6 * this.list.length);
  }

  /** The number of the proxy whose diamond is at a place on the map, within `reach`; -1 if there is none. */
  nearest(x, y, reach) {
    let best = -1, least = reach * reach;
    if (!this.shown) return best;
    for (let n = 0; n < this.list.length; n++) {
      const dx = this.list[n].x - x, dy = this.list[n].y - y, d = dx * dx + dy * dy;
      if (d < least) { least = d; best = n; }
    }
    return best;
  }
}
