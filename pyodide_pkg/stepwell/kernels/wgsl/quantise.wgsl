{# Products in integers: x as 16-bit numbers with a scale per block of 32, in two bytes that dot4I8Packed multiplies with
   elements of up to eight bits, four at a time. A value is hi * 256 + lo, both signed; the scale puts the largest of a
   block at 127 * 256 + 127, so that nothing is lost but what lies below 2^-16 of it. The sums are exact in 32 bits.

   DECLARE(blocks) goes to module scope. QUANTISE is collective in groups of four threads of a subgroup, which hold a
   block, eight values each. TAKE(block, groups) names what there is of a block of x; then, for a row's block q as
   UNPACK left it, SUMS(format, q) makes the sums and PRODUCT(format, q, formats) is that of x * weight. #}
{% macro declare(blocks) %}
var<workgroup> octets: array<vec4u, {{ 4 * blocks }}>;  // [block][octet]: hi of its halves, lo of its halves
var<workgroup> facts: array<vec4u, {{ blocks }}>;       // [block]: scale (f32), sums of its halves (i32)

fn quantise(octet: u32, e0: vec4f, e1: vec4f, inside: bool) {
  let largest = max(abs(e0), abs(e1));
  var top = max(max(largest.x, largest.y), max(largest.z, largest.w));
  top = max(top, subgroupShuffleXor(top, 1u));
  top = max(max(top, subgroupShuffleXor(top, 2u)), 1e-30);
  let scale = 32639.0 / top;
  let v0 = vec4i(round(e0 * scale));
  let v1 = vec4i(round(e1 * scale));
  let hi0 = (v0 + 128) >> vec4u(8u);
  let hi1 = (v1 + 128) >> vec4u(8u);
  let lo0 = v0 - (hi0 << vec4u(8u));
  let lo1 = v1 - (hi1 << vec4u(8u));
  var own = dot(v0 + v1, vec4i(1));
  own += subgroupShuffleXor(own, 1u);
  let other = subgroupShuffleXor(own, 2u);
  if (!inside) { return; }
  octets[octet] = vec4u(pack4xI8(hi0), pack4xI8(hi1), pack4xI8(lo0), pack4xI8(lo1));
  if (octet % 4u == 0u) {
    facts[octet / 4u] = vec4u(bitcast<u32>(top / 32639.0), bitcast<u32>(own), bitcast<u32>(other), 0u);
  }
}
{% endmacro %}

{% macro take(block, groups) %}
{% for j in range(4) %}
let o{{ j }} = octets[{{ block }} * 4u + {{ j }}u];
{% endfor %}
let fact = facts[{{ block }}];
let unit = bitcast<f32>(fact.x);
{% if groups == 2 %}
let sum_0 = bitcast<i32>(fact.y);
let sum_1 = bitcast<i32>(fact.z);
{% else %}
let sum_0 = bitcast<i32>(fact.y) + bitcast<i32>(fact.z);
{% endif %}
{% endmacro %}

{# Elements 8j + 4 half .. + 3 as signed bytes: those of SUMS. #}
{% macro _bytes(format, j, half) -%}
{%- if layouts[format].unpacked_bits == 4 -%}
q{{ half }}.{{ "xyzw"[j] }}
{%- else -%}
q{{ j // 2 }}.{{ "xyzw"[2 * (j % 2) + half] }}
{%- endif -%}
{%- endmacro %}
{% macro sums(format, q) %}
{% set layout = layouts[format] %}
{% for i in range(2) %}
{% if layout.unpacked_bits == 4 %}
let q{{ i }} = {{ "(%s_0 >> vec4u(4u))" % q if i else "%s_0" % q }} & vec4u(0x0f0f0f0fu);
{% else %}
let q{{ i }} = {{ q }}_{{ i }}{{ " ^ vec4u(0x80808080u)" if layout.bits == 8 }};
{% endif %}
{% endfor %}
{% for g in range(layout.groups) %}
{% for plane in ("hi", "lo") %}
let {{ plane }}{{ g }} = {% for j in range(g * 4 // layout.groups, (g + 1) * 4 // layout.groups) -%}
{%- for half in range(2) -%}
dot4I8Packed({{ _bytes(format, j, half) }}, o{{ j }}.{{ "xyzw"[half + (2 if plane == "lo" else 0)] }}){{ " + " if not loop.last }}
{%- endfor -%}{{ " + " if not loop.last }}
{%- endfor %};
{% endfor %}
{% endfor %}
{% endmacro %}
{% macro product(format, q, formats) -%}
{%- set layout = layouts[format] -%}
{%- set shift = (128 if layout.bits == 8 else 0) - layout.offset -%}
unit * (
{%- for g in range(layout.groups) -%}
{{ formats.scale(format, q, g) }} * f32((hi{{ g }} << 8u) + lo{{ g }}{{ " + %d * sum_%d" % (shift, g) if shift }})
{%- if layout.minimum %} + {{ formats.minimum(format, q, g) }} * f32(sum_{{ g }}){% endif -%}
{{ " + " if not loop.last }}
{%- endfor -%}
)
{%- endmacro %}
