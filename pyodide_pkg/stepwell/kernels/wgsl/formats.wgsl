{# How a matrix [n][k] lies in memory after `repack`, in blocks of 32 weights, per tensor format.

   words   vec4u, `vectors(format)` of them per block: the 32 elements in order, as nibbles, bytes, halves or floats
   scales  vec2f per block for the quantised formats: value = scale * element + minimum, elements counted from zero

   Both are [block][vector][row]: neighbouring threads work on neighbouring rows and read neighbouring words, and one
   thread reads whole vectors. Scales are f32 although files have f16: unpacking costs more than the bytes do. #}
{% macro vectors(format) %}{{ {"F32": 8, "F16": 4, "Q8_0": 2, "Q4_0": 1, "Q4_1": 1}[format] }}{% endmacro %}
{% macro quantised(format) %}{{ "yes" if format in ("Q8_0", "Q4_0", "Q4_1") }}{% endmacro %}

{# Element k of a block as f32. `q` is the prefix of the names of its vectors: q0, q1, …
   Nibbles and bytes are masked where they lie, so most come out too large by a power of two; FACTORS(format, j), for
   elements 4j .. 4j+3, puts that right: multiply the other factor by it, once per block. The topmost is shifted down
   instead, since it would not fit a signed integer: i32 -> f32 is one instruction on CPU adapters, u32 -> f32 is not. #}
{% macro element(format, q, k) -%}
{%- set bits = {"F32": 32, "F16": 16, "Q8_0": 8, "Q4_0": 4, "Q4_1": 4}[format] -%}
{%- set per_word = 32 // bits -%}
{%- set word = q ~ (k // (4 * per_word)) ~ "." ~ "xyzw"[k // per_word % 4] -%}
{%- set place = k % per_word -%}
{%- if bits == 32 -%}
bitcast<f32>({{ word }})
{%- elif bits == 16 -%}
unpack2x16float({{ word }}).{{ "xy"[place] }}
{%- elif place == per_word - 1 -%}
f32(i32({{ word }} >> {{ 32 - bits }}u))
{%- else -%}
f32(i32({{ word }} & {{ (2 ** bits - 1) * 2 ** (bits * place) }}u))
{%- endif -%}
{%- endmacro %}
{% macro factors(format, j) -%}
{%- if format == "Q8_0" -%}
vec4f(1.0, {{ 2.0 ** -8 }}, {{ 2.0 ** -16 }}, 1.0)
{%- elif j % 2 == 0 -%}
vec4f(1.0, {{ 2.0 ** -4 }}, {{ 2.0 ** -8 }}, {{ 2.0 ** -12 }})
{%- else -%}
vec4f({{ 2.0 ** -16 }}, {{ 2.0 ** -20 }}, {{ 2.0 ** -24 }}, 1.0)
{%- endif -%}
{%- endmacro %}
