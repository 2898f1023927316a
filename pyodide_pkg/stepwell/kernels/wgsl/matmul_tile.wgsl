// y[row][n] = sum over k of x[row][k] * W[n][k] for many rows, for GPUs: tiles of both factors in workgroup memory.
//
// A workgroup computes ROWS x COLUMNS outputs, a thread 4 x 4 of them, whose rows and columns lie a quarter apart. Per block
// of 32 it unpacks COLUMNS blocks of W once, for all rows.
//
// `mode` plain: y = …; residual: y += …; swiglu: W holds gate rows, then up rows; y = silu(gate) * up.
{% import "formats.wgsl" as formats %}
{% include "step.wgsl" %}
{% set quantised = formats.quantised(format) %}
{% set groups = formats.groups(format) | int or 1 %}
{% set outputs = n // 2 if mode == "swiglu" else n %}
{% set halves = 2 if mode == "swiglu" else 1 %}
{% set assign = {"plain": "=", "residual": "+=", "swiglu": "="}[mode] %}
{% set threads = rows // 4 * (columns // 4) %}
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
{{ formats.declare(format, 3) }}

const K4 = {{ k // 4 }}u;
const N = {{ n }}u;
const OUTPUTS = {{ outputs }}u;
const BLOCKS = {{ k // 32 }}u;
const ROWS = {{ rows }}u;
const COLUMNS = {{ columns }}u;
const THREADS = {{ threads }}u;
const PITCH = 9u;  // vec4f per row of a tile: eight, and one that keeps neighbouring rows in different banks
var<workgroup> xs: array<vec4f, {{ rows * 9 }}>;
var<workgroup> ws: array<vec4f, {{ columns * 9 * halves }}>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let first_row = group.y * ROWS;
  let first = group.x * COLUMNS;
  let tr = thread / {{ columns // 4 }}u;
  let tc = thread % {{ columns // 4 }}u;
{% for half in range(halves) %}
{% for r in range(4) %}
  var sum{{ half }}_{{ r }} = vec4f(0.0);
{% endfor %}
{% endfor %}
  for (var block = 0u; block < BLOCKS; block++) {
    for (var i = thread; i < ROWS * 8u; i += THREADS) {
      let row = min(first_row + i / 8u, step.rows - 1u);
      xs[i / 8u * PITCH + i % 8u] = x[row * K4 + block * 8u + i % 8u];
    }
    for (var i = thread; i < COLUMNS * 4u; i += THREADS) {
      let column = i % COLUMNS;
      let part = i / COLUMNS;  // of the block: a quarter of its elements
{% for half in range(halves) %}
      {
        let n = min(first + column, OUTPUTS - 1u){{ " + OUTPUTS" if half }};
        {{ formats.load(format, "w", "block", "n", "N") | trim | indent(8) }}
        let to = {{ half * columns * 9 }}u + column * PITCH + part * 2u;
        switch part {
{% for part in range(4) %}
          {{ "case %du" % part if part < 3 else "default" }}: {
{% for j in (2 * part, 2 * part + 1) %}
{% set elements = "vec4f(%s, %s, %s, %s)" % (formats.element(format, "w", 4 * j), formats.element(format, "w", 4 * j + 1), formats.element(format, "w", 4 * j + 2), formats.element(format, "w", 4 * j + 3)) %}
{% if quantised %}
{% set elements = formats.weights(format, "w", j * groups // 8, "(%s * %s)" % (elements, formats.factors(format, j))) %}
{% endif %}
            ws[to + {{ j % 2 }}u] = {{ elements }};
{% endfor %}
          }
{% endfor %}
        }
      }
{% endfor %}
    }
    workgroupBarrier();
    for (var j = 0u; j < 8u; j++) {
{% for r in range(4) %}
      let x{{ r }} = xs[(tr + {{ r * (rows // 4) }}u) * PITCH + j];
{% endfor %}
{% for half in range(halves) %}
{% for c in range(4) %}
      {
        let w = ws[{{ half * columns * 9 }}u + (tc + {{ c * (columns // 4) }}u) * PITCH + j];
{% for r in range(4) %}
        sum{{ half }}_{{ r }}.{{ "xyzw"[c] }} += dot(x{{ r }}, w);
{% endfor %}
      }
{% endfor %}
{% endfor %}
    }
    workgroupBarrier();
  }
{% for r in range(4) %}
  {
    let row = first_row + tr + {{ r * (rows // 4) }}u;
    if (row < step.rows) {
{% for c in range(4) %}
{% set value = "sum0_%d.%s" % (r, "xyzw"[c]) %}
{% if mode == "swiglu" %}
{% set value = "%s / (1.0 + exp(-%s)) * sum1_%d.%s" % (value, value, r, "xyzw"[c]) %}
{% endif %}
      if (first + tc + {{ c * (columns // 4) }}u < OUTPUTS) { y[row * OUTPUTS + first + tc + {{ c * (columns // 4) }}u] {{ assign }} {{ value }}; }
{% endfor %}
    }
  }
{% endfor %}
}
