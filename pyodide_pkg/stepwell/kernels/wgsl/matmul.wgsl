// y[row][n] = sum over k of x[row][k] * W[n][k].  W is quantised, in the layout of formats.wgsl.
// One thread per output column, for `tile` rows at once, so that a weight is unpacked once per tile.
//
// `mode` plain: y = …; residual: y += …; swiglu: W holds gate rows, then up rows; y = silu(gate) * up.
{% import "formats.wgsl" as formats %}
{% include "step.wgsl" %}
{% set block = formats.block_words(format) | int %}
{% set scaled = formats.has_scales(format) %}
{% set outputs = n // 2 if mode == "swiglu" else n %}
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
@group(0) @binding(3) var<storage, read> words: array<vec4u>;
{% if scaled %}
@group(0) @binding(4) var<storage, read> scales: array<u32>;
{% endif %}

const K4 = {{ k // 4 }}u;
const N = {{ n }}u;
const OUTPUTS = {{ outputs }}u;
const BLOCKS = {{ k // 32 }}u;
const TILE = {{ tile }}u;

// Products of row n of W with the tile's rows of x, from `first` on.
fn product(n: u32, first: u32) -> array<f32, TILE> {
  var sums: array<vec4f, TILE>;
  var mins: array<f32, TILE>;
  for (var block = 0u; block < BLOCKS; block++) {
    var w: array<vec4u, {{ block }}>;
{% for i in range(block) %}
    w[{{ i }}] = words[(block * {{ block }}u + {{ i }}u) * N + n];
{% endfor %}
{% if scaled %}
    let scale = unpack2x16float(scales[block * N + n]);
{% endif %}
{% for t in range(tile) %}
    var dot{{ t }} = vec4f(0.0);
    var all{{ t }} = vec4f(0.0);
{% endfor %}
    let at = first * K4 + block * 8u;
{% for part in range(8) %}
    {
      let q = {{ formats.elements(format, "w", part) }};
{% for t in range(tile) %}
      let x{{ t }} = x[at + {{ t }}u * K4 + {{ part }}u];
      dot{{ t }} += q * x{{ t }};
{% if format in ("Q4_0", "Q4_1") %}
      all{{ t }} += x{{ t }};
{% endif %}
{% endfor %}
    }
{% endfor %}
{% for t in range(tile) %}
{% if format == "Q4_1" %}
    sums[{{ t }}] += dot{{ t }} * scale.x + all{{ t }} * scale.y;
{% elif format == "Q4_0" %}
    sums[{{ t }}] += (dot{{ t }} - 8.0 * all{{ t }}) * scale.x;
{% elif format == "Q8_0" %}
    sums[{{ t }}] += dot{{ t }} * scale.x;
{% else %}
    sums[{{ t }}] += dot{{ t }};
{% endif %}
{% endfor %}
  }
  var totals: array<f32, TILE>;
{% for t in range(tile) %}
  totals[{{ t }}] = dot(sums[{{ t }}], vec4f(1.0));
{% endfor %}
  return totals;
}

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3u) {
  let n = id.x;
  if (n >= OUTPUTS) { return; }
  let first = id.y * TILE;
{% if mode == "swiglu" %}
  let gate = product(n, first);
  let up = product(n + OUTPUTS, first);
{% else %}
  let total = product(n, first);
{% endif %}
{% for t in range(tile) %}
  if (first + {{ t }}u < step.rows{{ " || true" if tile == 1 }}) {
{% if mode == "swiglu" %}
    y[(first + {{ t }}u) * OUTPUTS + n] = gate[{{ t }}] / (1.0 + exp(-gate[{{ t }}])) * up[{{ t }}];
{% elif mode == "residual" %}
    y[(first + {{ t }}u) * OUTPUTS + n] += total[{{ t }}];
{% else %}
    y[(first + {{ t }}u) * OUTPUTS + n] = total[{{ t }}];
{% endif %}
  }
{% endfor %}
}
