// x[row] = row ids[row] of the embedding matrix. One thread per block of 32 values.
{% import "formats.wgsl" as formats %}
{% include "step.wgsl" %}
{% set block = formats.block_words(format) | int %}
@group(0) @binding(1) var<storage, read> ids: array<u32>;
@group(0) @binding(2) var<storage, read_write> x: array<vec4f>;
@group(0) @binding(3) var<storage, read> words: array<vec4u>;
{% if formats.has_scales(format) %}
@group(0) @binding(4) var<storage, read> scales: array<u32>;
{% endif %}

const WIDTH = {{ width }}u;
const VOCAB = {{ vocab }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3u) {
  let block = id.x;
  if (block >= WIDTH / 32u) { return; }
  let token = min(ids[id.y], VOCAB - 1u);
  var w: array<vec4u, {{ block }}>;
  for (var i = 0u; i < {{ block }}u; i++) { w[i] = words[(block * {{ block }}u + i) * VOCAB + token]; }
{% if formats.has_scales(format) %}
  let scale = unpack2x16float(scales[block * VOCAB + token]);
{% endif %}
  let at = id.y * (WIDTH / 4u) + block * 8u;
{% for part in range(8) %}
  {
    let q = {{ formats.elements(format, "w", part) }};
{% if format == "Q4_1" %}
    x[at + {{ part }}u] = q * scale.x + scale.y;
{% elif format == "Q4_0" %}
    x[at + {{ part }}u] = (q - 8.0) * scale.x;
{% elif format == "Q8_0" %}
    x[at + {{ part }}u] = q * scale.x;
{% else %}
    x[at + {{ part }}u] = q;
{% endif %}
  }
{% endfor %}
}
