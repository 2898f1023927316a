{# How kernels read a matrix [n][k]: blocks of 32 weights in a layout of kernels/layouts.py (`layouts`, a global here).

   words   vec4u, `vectors` of them per block: the elements in order. Elements of 4, 5 and 6 bits have their low four
           in word w = k / 8: of elements 8w .. 8w+3 in the low nibbles of its bytes, of 8w+4 .. 8w+7 in the high ones
   scales  per block, u32 vectors: each scale (f32), followed by its minimum if the layout has any, then the high bits.
           5 bits: word w's are bit w of every nibble. 6 bits: bits 2(w % 2) and 2(w % 2) + 1 of every nibble of
           high word w / 2. So a shift and a mask put them where the nibbles are

   Both are [block][vector][row]: neighbouring threads work on neighbouring rows and read neighbouring words, and one
   thread reads whole vectors.

   DECLARE makes `words: array<vec4u>` and, if QUANTISED, `scales: array<SCALE_TYPE>` of two bindings. Per block and row a
   kernel says LOAD(format, "q", block, n, N), which declares vectors named q_…, and then asks for ELEMENT, SCALE, MINIMUM
   of "q". #}
{% macro vectors(format) %}{{ layouts[format].vectors }}{% endmacro %}
{% macro quantised(format) %}{{ "yes" if layouts[format].quantised }}{% endmacro %}
{% macro scale_type(format) %}{{ ["u32", "vec2u", "", "vec4u"][layouts[format].scale_width - 1] }}{% endmacro %}
{% macro scale_vectors(format) %}{{ layouts[format].scale_vectors }}{% endmacro %}
{% macro declare(format, binding, access="read") %}
@group(0) @binding({{ binding }}) var<storage, {{ access }}> words: array<vec4u>;
{% if layouts[format].quantised %}
@group(0) @binding({{ binding + 1 }}) var<storage, {{ access }}> scales: array<{{ scale_type(format) }}>;
{% endif %}
{% endmacro %}
{% macro minimums(format) %}{{ "yes" if layouts[format].minimum }}{% endmacro %}
{% macro offset(format) %}{{ layouts[format].offset }}.0{% endmacro %}
{# scales per block: elements 0 .. 32 / groups - 1 have the first #}
{% macro groups(format) %}{{ layouts[format].groups }}{% endmacro %}

{# Word i of the scales that LOAD has read. #}
{% macro _word(format, q, i) -%}
{%- set width = layouts[format].scale_width -%}
{{ q }}_s{{ i // width }}{{ "." ~ "xyzw"[i % width] if width > 1 }}
{%- endmacro %}

{# Declare one block of row n of N rows, as vectors q_0, q_1, …: nibbles as they lie, or bytes, halves, floats in order.
   FETCH reads memory, UNPACK makes the vectors of it: a kernel may have other work in between. #}
{% macro load(format, q, block, n, rows) %}
{{ fetch(format, q, block, n, rows) }}
{{ unpack(format, q) }}
{% endmacro %}
{% macro fetch(format, q, block, n, rows) %}{{ _read("let ", format, q, block, n, rows) }}{% endmacro %}
{% macro _read(declare, format, q, block, n, rows, part="", parts=1) %}
{% set layout = layouts[format] %}
{% set own = _own_vectors(format, parts) | int %}
{% for i in range(layout.scale_vectors) %}
{{ declare }}{{ q }}_s{{ i }} = scales[({{ block }} * {{ layout.scale_vectors }}u + {{ i }}u) * {{ rows }} + {{ n }}];
{% endfor %}
{% if layout.high_words %}
{{ declare }}{{ q }}_n = words[{{ block }} * {{ rows }} + {{ n }}];
{% else %}
{% for i in range(own) %}
{{ declare }}{{ q }}_{{ i }} = words[({{ block }} * {{ layout.vectors }}u + {{ "%s * %du + " % (part, own) if own < layout.vectors }}{{ i }}u) * {{ rows }} + {{ n }}];
{% endfor %}
{% endif %}
{% endmacro %}
{% macro unpack(format, q) %}
{% set layout = layouts[format] %}
{% if layout.high_words %}
{% set first = layout.scale_words - layout.high_words %}
{% set mask = 2 ** layout.high_words - 1 %}
{% if layout.high_words == 1 %}
let {{ q }}_h = vec4u({{ _word(format, q, first) }}) >> vec4u(0u, 1u, 2u, 3u);
{% else %}
let {{ q }}_h = vec4u(vec2u({{ _word(format, q, first) }}), vec2u({{ _word(format, q, first + 1) }})) >> vec4u(0u, 2u, 0u, 2u);
{% endif %}
let {{ q }}_a = ({{ q }}_n & vec4u(0x0f0f0f0fu)) | (({{ q }}_h & vec4u({{ mask * 0x01010101 }}u)) << vec4u(4u));
let {{ q }}_b = (({{ q }}_n >> vec4u(4u)) & vec4u(0x0f0f0f0fu)) | ({{ q }}_h & vec4u({{ mask * 0x10101010 }}u));
let {{ q }}_0 = vec4u({{ q }}_a.x, {{ q }}_b.x, {{ q }}_a.y, {{ q }}_b.y);
let {{ q }}_1 = vec4u({{ q }}_a.z, {{ q }}_b.z, {{ q }}_a.w, {{ q }}_b.w);
{% endif %}
{% endmacro %}

{# Instead of LOAD, where a later block is read while one is computed with: HOLD declares variables, and REFILL reads a block
   into them. Where two threads unpack a block, `part` 0 has the first half of the elements. After UNPACK, PART names what this thread has of them: ELEMENT(format, h, k) from k = 0 on, WEIGHTS_OF_PART(format, h, g, …). #}
{% macro _own_vectors(format, parts) -%}
{{ 1 if layouts[format].bits < 8 else layouts[format].vectors // parts }}
{%- endmacro %}
{% macro hold(format, q, parts=1) %}
{% for i in range(layouts[format].scale_vectors) %}
var {{ q }}_s{{ i }}: {{ scale_type(format) }};
{% endfor %}
{% if layouts[format].high_words %}
var {{ q }}_n: vec4u;
{% else %}
{% for i in range(_own_vectors(format, parts) | int) %}
var {{ q }}_{{ i }}: vec4u;
{% endfor %}
{% endif %}
{% endmacro %}
{% macro refill(format, q, block, n, rows, part="", parts=1) %}{{ _read("", format, q, block, n, rows, part, parts) }}{% endmacro %}
{% macro part(format, q, h, part, parts) %}
{% set layout = layouts[format] %}
{% if parts == 2 and layout.bits < 8 %}
let {{ h }}_0 = {{ "select(%s_0, %s_1, %s == 1u)" % (q, q, part) if layout.high_words else "select(%s_0.xy, %s_0.zw, %s == 1u)" % (q, q, part) }};
{% else %}
{% for i in range((layout.vectors if layout.bits >= 8 else 2 if layout.high_words else 1) // (parts if layout.bits >= 8 else 1)) %}
let {{ h }}_{{ i }} = {{ q }}_{{ i }};
{% endfor %}
{% endif %}
{% for g in range(1 if parts == 2 else layout.groups) %}
{% for name in ("scale", "minimum") if layout.quantised and (name == "scale" or layout.minimum) %}
{% set of = scale if name == "scale" else minimum %}
let {{ h }}_{{ name }}{{ g }} = {{ "select(%s, %s, %s == 1u)" % (of(format, q, 0), of(format, q, 1), part) if parts == 2 and layout.groups == 2 else of(format, q, g) }};
{% endfor %}
{% endfor %}
{% endmacro %}
{% macro weights_of_part(format, h, g, elements) -%}
{{ _weights(format, elements, "%s_scale%d" % (h, g), "%s_minimum%d" % (h, g)) }}
{%- endmacro %}

{# Element k of a block as f32, counted from zero.
   Nibbles and bytes are masked where they lie, so most come out too large by a power of two; FACTORS(format, j), for
   elements 4j .. 4j+3, puts that right: multiply the other factor by it, once per block. The topmost is shifted down
   instead, since it would not fit a signed integer: i32 -> f32 is one instruction on CPU adapters, u32 -> f32 is not. #}
{% macro element(format, q, k) -%}
{%- set bits = layouts[format].unpacked_bits -%}
{%- set per_word = 32 // bits -%}
{%- set word = q ~ "_" ~ (k // (4 * per_word)) ~ "." ~ "xyzw"[k // per_word % 4] -%}
{%- set place = k % 4 * 8 + k % 8 // 4 * 4 if bits == 4 else k % per_word * bits -%}
{%- if bits == 32 -%}
bitcast<f32>({{ word }})
{%- elif format == "BF16" -%}
bitcast<f32>({{ word }} {{ "& 0xffff0000u" if place else "<< 16u" }})
{%- elif bits == 16 -%}
unpack2x16float({{ word }}).{{ "y" if place else "x" }}
{%- elif place == 32 - bits -%}
f32(i32({{ word }} >> {{ place }}u))
{%- else -%}
f32(i32({{ word }} & {{ (2 ** bits - 1) * 2 ** place }}u))
{%- endif -%}
{%- endmacro %}
{% macro factors(format, j) -%}
{%- if layouts[format].unpacked_bits == 8 -%}
vec4f(1.0, {{ 2.0 ** -8 }}, {{ 2.0 ** -16 }}, 1.0)
{%- elif j % 2 == 0 -%}
vec4f(1.0, {{ 2.0 ** -8 }}, {{ 2.0 ** -16 }}, {{ 2.0 ** -24 }})
{%- else -%}
vec4f({{ 2.0 ** -4 }}, {{ 2.0 ** -12 }}, {{ 2.0 ** -20 }}, 1.0)
{%- endif -%}
{%- endmacro %}

{# weight = SCALE * element + MINIMUM, or SCALE * (element - OFFSET): of group g, f32. #}
{% macro scale(format, q, g) -%}
bitcast<f32>({{ _word(format, q, 2 * g if layouts[format].minimum else g) }})
{%- endmacro %}
{% macro minimum(format, q, g) -%}
bitcast<f32>({{ _word(format, q, 2 * g + 1) }})
{%- endmacro %}

{# Declare the size that no weight of the block exceeds. #}
{% macro largest(format, q, name) %}
{% set layout = layouts[format] %}
{% for g in range(layout.groups) %}
{% if layout.minimum %}
let {{ name }}{{ g }} = max(abs({{ minimum(format, q, g) }}), abs({{ scale(format, q, g) }} * {{ 2 ** layout.bits - 1 }}.0 + {{ minimum(format, q, g) }}));
{% else %}
let {{ name }}{{ g }} = abs({{ scale(format, q, g) }}) * {{ layout.offset }}.0;
{% endif %}
{% endfor %}
let {{ name }} = {{ "max(%s0, %s1)" % (name, name) if layout.groups == 2 else "%s0" % name }};
{% endmacro %}

{# Elements as they are in a vec4f -> weights. #}
{% macro weights(format, q, g, elements) -%}
{{ _weights(format, elements, scale(format, q, g), minimum(format, q, g)) }}
{%- endmacro %}
{% macro _weights(format, elements, scale, minimum) -%}
{{ "%s * %s + %s" % (elements, scale, minimum) if layouts[format].minimum else "(%s - %s) * %s" % (elements, offset(format), scale) }}
{%- endmacro %}

{# Sum of x * weight over group g, of `dot`, the sum of x * element, and `sum`, that of x, after SUM_FACTOR. #}
{% macro weighed(format, q, g, dot, sum) -%}
{%- if layouts[format].minimum -%}
{{ scale(format, q, g) }} * {{ dot }} + {{ minimum(format, q, g) }} * {{ sum }}
{%- else -%}
{{ scale(format, q, g) }} * ({{ dot }} + {{ sum }})
{%- endif -%}
{%- endmacro %}
{% macro sum_factor(format) %}{{ "-%d.0 * " % layouts[format].offset if layouts[format].offset }}{% endmacro %}
