// Random weights of mean 0 and standard deviation DEVIATION in the layout of formats.wgsl. Every word is a hash of its
// place and of the seed, which is the step's position, so that one pipeline fills all matrices of a shape. One thread per
// block of 32 weights.
//
// Elements are uniform. Each scale has the same size and a random sign: elements from 0 to 15 less an offset of 8 have a
// mean of -1/2, which with one sign would give every output of a product the same share of its inputs' sum.
{% import "formats.wgsl" as formats %}
{% include "step.wgsl" %}
{% set layout = layouts[format] %}
{{ formats.declare(format, 1, "read_write") }}

const N = {{ n }}u;
const BLOCKS = {{ k // 32 }}u;
{% if layout.quantised %}
{# of (element - offset)^2, or of (element - mean)^2 #}
{% set moment = (4 ** layout.bits - 1) / 12 + (0.25 if layout.offset else 0) %}
const SCALE = f32({{ deviation / moment ** 0.5 }});
{% else %}
const REACH = f32({{ deviation * 3 ** 0.5 }});  // uniform from -REACH to REACH
{% endif %}

// A permutation of 32 bits in which every bit depends on all: the final mixer of MurmurHash3.
fn scramble(value: vec4u) -> vec4u {
  var h = value;
  h = (h ^ (h >> vec4u(16u))) * 0x85ebca6bu;
  h = (h ^ (h >> vec4u(13u))) * 0xc2b2ae35u;
  return h ^ (h >> vec4u(16u));
}

// Twice, so that another seed is another sequence and not the same one from another place on.
fn draw(place: u32) -> vec4u {
  return scramble(scramble(vec4u(4u * place) + vec4u(0u, 1u, 2u, 3u)) ^ scramble(vec4u(step.position + 1u)));
}
{% if not layout.quantised %}

fn spread(bits: vec4u) -> vec4u {
{% if format == "F32" %}
  return bitcast<vec4u>((vec4f(bits >> vec4u(8u)) * {{ 2.0 ** -23 }} - 1.0) * REACH);
{% else %}
  let low = (vec4f(bits & vec4u(0xffffu)) * {{ 2.0 ** -15 }} - 1.0) * REACH;
  let high = (vec4f(bits >> vec4u(16u)) * {{ 2.0 ** -15 }} - 1.0) * REACH;
{% if format == "BF16" %}
  return (bitcast<vec4u>(low) >> vec4u(16u)) | (bitcast<vec4u>(high) & vec4u(0xffff0000u));
{% else %}
  return vec4u({% for c in "xyzw" %}pack2x16float(vec2f(low.{{ c }}, high.{{ c }})){{ ", " if not loop.last }}{% endfor %});
{% endif %}
{% endif %}
}
{% endif %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3u) {
  let row = id.x;
  let block = id.y;
  if (row >= N) { return; }
  let first = (row * BLOCKS + block) * {{ layout.vectors + 1 }}u;
{% for i in range(layout.vectors) %}
{% set drawn = "draw(first + %du)" % i %}
  words[(block * {{ layout.vectors }}u + {{ i }}u) * N + row] = {{ drawn if layout.quantised else "spread(%s)" % drawn }};
{% endfor %}
{% if layout.quantised %}
  let more = draw(first + {{ layout.vectors }}u);  // x: signs; y, z: high bits
{% set out = [] %}
{% for g in range(layout.groups) %}
  let scale{{ g }} = select(SCALE, -SCALE, (more.x & {{ 2 ** g }}u) != 0u);
{% set _ = out.append("bitcast<u32>(scale%d)" % g) %}
{% if layout.minimum %}
{% set _ = out.append("bitcast<u32>(scale%d * -%s)" % (g, (2 ** layout.bits - 1) / 2)) %}
{% endif %}
{% endfor %}
{% for i in range(layout.high_words) %}
{% set _ = out.append("more." ~ "yz"[i]) %}
{% endfor %}
{% set width = layout.scale_width %}
{% for i in range(layout.scale_vectors) %}
  scales[(block * {{ layout.scale_vectors }}u + {{ i }}u) * N + row] = {{ formats.scale_type(format) }}({{ out[i * width : (i + 1) * width] | join(", ") }});
{% endfor %}
{% endif %}
}
