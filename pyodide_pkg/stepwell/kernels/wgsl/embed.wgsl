// x[row] = row ids[row] of the embedding matrix. One thread per block of 32 values.
{% import "formats.wgsl" as formats %}
{% include "step.wgsl" %}
{% set quantised = formats.quantised(format) %}
@group(0) @binding(1) var<storage, read> ids: array<u32>;
@group(0) @binding(2) var<storage, read_write> x: array<vec4f>;
{{ formats.declare(format, 3) }}

const WIDTH = {{ width }}u;
const VOCAB = {{ vocab }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3u) {
  let block = id.x;
  if (block >= WIDTH / 32u) { return; }
  let token = min(ids[id.y], VOCAB - 1u);
  {{ formats.load(format, "q", "block", "token", "VOCAB") | trim | indent(2) }}
  let at = id.y * (WIDTH / 4u) + block * 8u;
{% for j in range(8) %}
  let e{{ j }} = vec4f({% for c in range(4) %}{{ formats.element(format, "q", 4 * j + c) }}{{ ", " if not loop.last }}{% endfor %});
{% if quantised %}
{% set group = j * formats.groups(format) | int // 8 %}
  x[at + {{ j }}u] = {{ formats.weights(format, "q", group, "(e%d * %s)" % (j, formats.factors(format, j))) }};
{% else %}
  x[at + {{ j }}u] = e{{ j }};
{% endif %}
{% endfor %}
}
