{# Products in integers: x as 16-bit numbers with a scale per block of 32, in two bytes that dot4I8Packed multiplies with
   elements of up to eight bits, four at a time. A value is hi * 256 + lo, both signed; the scale puts the largest of a
   block at 127 * 256 + 127, so that nothing is lost but what lies below 2^-16 of it. The sums are exact in 32 bits.

   DECLARE(blocks) goes to module scope. QUANTISE is collective in groups of four threads of a subgroup, which hold a
   block, eight values each. TAKE(block, groups) names what there is of a block of x; then, for a row's block q as
   UNPACK left it, SUMS(format, q) makes the sums and PRODUCT(format, q) is that of x * weight. #}
{% macro declare(blocks, nibbles) %}
var<workgroup> planes: array<vec4u, {{ 4 * blocks }}>;  // [block][hi 0, hi 1, lo 0, lo 1]
var<workgroup> facts: array<vec4u, {{ blocks }}>;       // [block]: scale (f32), sums of the halves (i32)

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
  var own = dot(v0 + v1, vec4i(1));
  own += subgroupShuffleXor(own, 1u);
  let other = subgroupShuffleXor(own, 2u);
  if (!inside) { return; }
  let block = octet / 4u;
  let j = octet % 4u;
{% if nibbles %}
  let at = block * 4u;
  planes[at][j] = pack4xI8(hi0);
  planes[at + 1u][j] = pack4xI8(hi1);
  planes[at + 2u][j] = pack4xI8(v0 - (hi0 << vec4u(8u)));
  planes[at + 3u][j] = pack4xI8(v1 - (hi1 << vec4u(8u)));
{% else %}
  let at = block * 4u + j / 2u;
  let c = 2u * (j % 2u);
  planes[at][c] = pack4xI8(hi0);
  planes[at][c + 1u] = pack4xI8(hi1);
  planes[at + 2u][c] = pack4xI8(v0 - (hi0 << vec4u(8u)));
  planes[at + 2u][c + 1u] = pack4xI8(v1 - (hi1 << vec4u(8u)));
{% endif %}
  if (j == 0u) { facts[block] = vec4u(bitcast<u32>(top / 32639.0), bitcast<u32>(own), bitcast<u32>(other), 0u); }
}
{% endmacro %}

{% macro take(block, groups) %}
let h0 = planes[{{ block }} * 4u];
let h1 = planes[{{ block }} * 4u + 1u];
let l0 = planes[{{ block }} * 4u + 2u];
let l1 = planes[{{ block }} * 4u + 3u];
let fact = facts[{{ block }}];
let unit = bitcast<f32>(fact.x);
{% if groups == 2 %}
let sum_0 = bitcast<i32>(fact.y);
let sum_1 = bitcast<i32>(fact.z);
{% else %}
let sum_0 = bitcast<i32>(fact.y) + bitcast<i32>(fact.z);
{% endif %}
{% endmacro %}

{# Vector i of elements as signed bytes. #}
{% macro _bytes(format, q, i) -%}
{%- if layouts[format].unpacked_bits == 4 -%}
({{ q }}_0{{ " >> vec4u(4u)" if i }}) & vec4u(0x0f0f0f0fu)
{%- elif layouts[format].bits == 8 -%}
{{ q }}_{{ i }} ^ vec4u(0x80808080u)
{%- else -%}
{{ q }}_{{ i }}
{%- endif -%}
{%- endmacro %}
{% macro _dot4(words, plane) -%}
{% for c in "xyzw" %}dot4I8Packed({{ words }}.{{ c }}, {{ plane }}.{{ c }}){{ " + " if not loop.last }}{% endfor %}
{%- endmacro %}

{# Declares the sums over the block of row q, per group: then PRODUCT is an expression. #}
{% macro sums(format, q) %}
{% set groups = layouts[format].groups %}
{% for i in range(2) %}
let q{{ i }} = {{ _bytes(format, q, i) }};
let at{{ i }} = (({{ _dot4("q%d" % i, "h%d" % i) }}) << 8u) + {{ _dot4("q%d" % i, "l%d" % i) }};
{% endfor %}
{% endmacro %}
{% macro product(format, q, formats) -%}
{%- set layout = layouts[format] -%}
{%- set shift = (128 if layout.bits == 8 else 0) - layout.offset -%}
unit * (
{%- for g in range(layout.groups) -%}
{%- set dots = "at0 + at1" if layout.groups == 1 else "at%d" % g -%}
{{ formats.scale(format, q, g) }} * f32({{ dots }}{{ " + %d * sum_%d" % (shift, g) if shift }})
{%- if layout.minimum %} + {{ formats.minimum(format, q, g) }} * f32(sum_{{ g }}){% endif -%}
{{ " + " if not loop.last }}
{%- endfor -%}
)
{%- endmacro %}
