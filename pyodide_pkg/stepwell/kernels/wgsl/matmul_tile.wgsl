// y[row][n] = sum over k of x[row][k] * W[n][k] for many rows, for GPUs: tiles of both factors in workgroup memory.
//
// A workgroup takes ROWS rows and COLUMNS rows of W ("columns"), a thread `tall` x `across` of their products, which lie
// ROWS / tall and COLUMNS / across apart: multiples of eight. Per block of 32 each weight is unpacked once, by PARTS threads
// per column. What a thread brings of the next block is on its way from memory while it computes; with two `stages` it has
// a place of its own in workgroup memory, and a block takes one barrier instead of two.
//
// A row of a tile is a few vectors, in an order that is its own (swizzle): neighbouring rows have theirs in different banks.
//
// `arithmetic` f32; f16, for quantised W: x comes from halve.wgsl, below 8 in size, and W is kept as numbers of at most 128,
// with a factor per block and column: its elements as they are, less the offset, or, where a block has minimums or two scales,
// its weights divided by a 128th of the largest possible. Products are summed in pairs of f16, of which each takes half of a
// `run` of 16 or 32 terms: at most 16 * 8 * 128 = 16,384, a quarter of what f16 holds. All else is added in f32. With u = 2^-11
// an output is off by at most (run / 2 + 2) u times the sum of its terms' sizes, and, should the GPU take subnormal
// f16 as zero, per term by 2^-15 times the largest of the row times the largest that the block may have.
//
// `mode` plain: y = …; residual: y += …; swiglu: W holds gate rows, then up rows; y = silu(gate) * up. The columns of a
// tile are then gate and up of half as many outputs, and both of an output are one thread's.
{% import "formats.wgsl" as formats %}
{% set f16 = {"f32": false, "f16": true}[arithmetic] %}
{% if f16 %}
enable f16;
{% endif %}
{% include "step.wgsl" %}
{% set quantised = formats.quantised(format) %}
{% set groups = formats.groups(format) | int or 1 %}
{% set outputs = n // 2 if mode == "swiglu" else n %}
{% set halves = 2 if mode == "swiglu" else 1 %}
{% set assign = {"plain": "=", "residual": "+=", "swiglu": "="}[mode] %}
{% set down = rows // tall %}
{% set along = columns // across %}
{% set threads = down * along %}
{% set parts = 2 if threads >= 2 * columns else 1 %}
{% set units = 4 if f16 else 8 %}
{% set vector = "vec4u" if f16 else "vec4f" %}
{% set of_runs = f16 and run < 32 %}
{% set turns = (rows * units + threads - 1) // threads %}
@group(0) @binding(1) var<storage, read> x: array<{{ vector }}>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
{{ formats.declare(format, 3) }}

const N = {{ n }}u;
const OUTPUTS = {{ outputs }}u;
const BLOCKS = {{ k // 32 }}u;
const ROWS = {{ rows }}u;
const COLUMNS = {{ columns }}u;
const PARTS = {{ parts }}u;
const THREADS = {{ threads }}u;
const UNITS = {{ units }}u;  // vectors of 16 bytes in a row of a tile
const PITCH = {{ k // 32 * units }}u;  // and of x
var<workgroup> xs: array<{{ vector }}, {{ stages * rows * units }}>;
var<workgroup> ws: array<{{ vector }}, {{ stages * columns * units }}>;
{% if f16 %}
var<workgroup> factors: array<f32, {{ stages * columns }}>;  // of ws
{% endif %}

fn swizzle(row: u32, unit: u32) -> u32 {
  return row * UNITS + (unit ^ {{ "((row >> 1u) & 3u)" if f16 else "(row & 7u)" }});
}

{# From memory to registers: what this thread brings of a block. #}
{% macro fetch(block) %}
{% for t in range(turns) %}
x{{ t }} = x[from{{ t }} + {{ block }} * UNITS];
{% endfor %}
{{ formats.refill(format, "w", block, "n", "N", "part", parts) | trim }}
{% endmacro %}

{# From registers to workgroup memory. #}
{% macro put(stage) %}
{% for t in range(turns) %}
{{ "if (thread + %du < %du) { " % (t * threads, rows * units) if (t + 1) * threads > rows * units -}}
xs[{{ stage }} * {{ rows * units }}u + to + {{ t * threads }}u] = x{{ t }};
{{- " }" if (t + 1) * threads > rows * units }}
{% endfor %}
{{ "if (thread < COLUMNS * PARTS) {" if threads > columns * parts else "{" }}
  {{ formats.unpack(format, "w") | trim | indent(2) }}
  {{ formats.part(format, "w", "h", "part", parts) | trim | indent(2) }}
{% if f16 %}
{% set exact = groups == 1 and not formats.minimums(format) %}
{% if exact %}
  let factor = {{ formats.scale(format, "w", 0) }};
{% else %}
  {{ formats.largest(format, "w", "largest") | trim | indent(2) }}
  let factor = max(largest, 1e-30) / 128.0;
  let inverse = 1.0 / factor;
{% endif %}
{% endif %}
{% for j in range(8 // parts) %}
{% set elements = "vec4f(%s, %s, %s, %s)" % (formats.element(format, "h", 4 * j), formats.element(format, "h", 4 * j + 1), formats.element(format, "h", 4 * j + 2), formats.element(format, "h", 4 * j + 3)) %}
{% if quantised %}
{% set elements = "(%s * %s)" % (elements, formats.factors(format, j)) %}
{% if f16 and exact %}
{% set elements = "%s - %s" % (elements, formats.offset(format)) %}
{% else %}
{% set elements = formats.weights_of_part(format, "h", j * groups // 8 if parts == 1 else 0, elements) %}
{% endif %}
{% endif %}
{% if f16 %}
  let e{{ j }} = {{ elements if exact else "(%s) * inverse" % elements }};
{% if j % 2 %}
  ws[{{ stage }} * {{ columns * units }}u + swizzle(column, part * {{ 4 // parts }}u + {{ j // 2 }}u)] = vec4u(
    pack2x16float(e{{ j - 1 }}.xy), pack2x16float(e{{ j - 1 }}.zw), pack2x16float(e{{ j }}.xy), pack2x16float(e{{ j }}.zw));
{% endif %}
{% else %}
  ws[{{ stage }} * {{ columns * units }}u + swizzle(column, part * {{ 8 // parts }}u + {{ j }}u)] = {{ elements }};
{% endif %}
{% endfor %}
{% if f16 %}
  {{ "if (part == 0u) { " if parts == 2 }}factors[{{ stage }} * COLUMNS + column] = factor;{{ " }" if parts == 2 }}
{% endif %}
}
{% endmacro %}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let first_row = group.y * ROWS;
  let first = group.x * {{ columns // halves }}u;
  let to = swizzle(thread / UNITS, thread % UNITS);
{% for t in range(turns) %}
  let from{{ t }} = min(first_row + (thread + {{ t * threads }}u) / UNITS, step.rows - 1u) * PITCH + thread % UNITS;
  var x{{ t }}: {{ vector }};
{% endfor %}
  let column = thread % COLUMNS;
  let part = {{ "0u" if parts == 1 else "thread / COLUMNS" if threads == columns * parts else "min(thread / COLUMNS, PARTS - 1u)" }};
{% if mode == "swiglu" %}
  let n = min(first + column % {{ columns // 2 }}u, OUTPUTS - 1u) + column / {{ columns // 2 }}u * OUTPUTS;
{% else %}
  let n = min(first + column, OUTPUTS - 1u);
{% endif %}
  {{ formats.hold(format, "w", parts) | trim | indent(2) }}
  let tr = thread / {{ along }}u;
  let tc = thread % {{ along }}u;
{% for r in range(tall) %}
{% for c in range(across) %}
  var sum{{ r }}_{{ c }} = 0.0;
{% endfor %}
{% endfor %}
  {{ fetch("0u") | trim | indent(2) }}
{% if stages == 2 %}
  {{ put("0u") | trim | indent(2) }}
{% endif %}
  for (var block = 0u; block < BLOCKS; block++) {
    let next = min(block + 1u, BLOCKS - 1u);
{% if stages == 1 %}
    {{ put("0u") | trim | indent(4) }}
{% endif %}
    workgroupBarrier();
    {{ fetch("next") | trim | indent(4) }}
{% set stage = "block % 2u" if stages == 2 else "0u" %}
{% if of_runs %}
    for (var first_unit = 0u; first_unit < UNITS; first_unit += {{ run // 8 }}u) {
{% endif %}
{% if f16 %}
{% for r in range(tall) %}
{% for c in range(across) %}
    var run{{ r }}_{{ c }} = vec2h(0.0h);
{% endfor %}
{% endfor %}
{% endif %}
    for (var j = {{ "first_unit" if of_runs else "0u" }}; j < {{ "first_unit + %du" % (run // 8) if of_runs else "UNITS" }}; j++) {
      let x_at = {{ stage }} * {{ rows * units }}u + swizzle(tr, j);
      let w_at = {{ stage }} * {{ columns * units }}u + swizzle(tc, j);
{% for r in range(tall) %}
      let a_{{ r }} = xs[x_at + {{ r * down * units }}u];
{% endfor %}
{% for c in range(across) %}
      let b_{{ c }} = ws[w_at + {{ c * along * units }}u];
{% for i in "xyzw" %}
{% for r in range(tall) %}
{% if f16 %}
      run{{ r }}_{{ c }} = fma(bitcast<vec2h>(a_{{ r }}.{{ i }}), bitcast<vec2h>(b_{{ c }}.{{ i }}), run{{ r }}_{{ c }});
{% else %}
      sum{{ r }}_{{ c }} = fma(a_{{ r }}.{{ i }}, b_{{ c }}.{{ i }}, sum{{ r }}_{{ c }});
{% endif %}
{% endfor %}
{% endfor %}
{% endfor %}
    }
{% if f16 %}
{% for c in range(across) %}
    let factor_{{ c }} = factors[{{ stage }} * COLUMNS + tc + {{ c * along }}u];
{% for r in range(tall) %}
    sum{{ r }}_{{ c }} = fma(f32(run{{ r }}_{{ c }}.x) + f32(run{{ r }}_{{ c }}.y), factor_{{ c }}, sum{{ r }}_{{ c }});
{% endfor %}
{% endfor %}
{% endif %}
{% if of_runs %}
    }
{% endif %}
{% if stages == 2 %}
    {{ put("(block + 1u) % 2u") | trim | indent(4) }}
{% else %}
    workgroupBarrier();
{% endif %}
  }
{% for r in range(tall) %}
  {
    let row = first_row + tr + {{ r * down }}u;
    if (row < step.rows) {
{% if f16 %}
      let power = bitcast<f32>(x[step.rows * PITCH + row].x);
{% for c in range(across) %}
      sum{{ r }}_{{ c }} *= power;
{% endfor %}
{% endif %}
{% for c in range(across // halves) %}
{% set value = "sum%d_%d" % (r, c) %}
{% if mode == "swiglu" %}
{% set value = "%s / (1.0 + exp(-%s)) * sum%d_%d" % (value, value, r, c + across // 2) %}
{% endif %}
      if (first + tc + {{ c * along }}u < OUTPUTS) { y[row * OUTPUTS + first + tc + {{ c * along }}u] {{ assign }} {{ value }}; }
{% endfor %}
    }
  }
{% endfor %}
}
