{# How a block of 32 weights lies in memory after `repack`, per tensor format.

   words   vec4<u32>, `block_words` per block: the elements in order, as nibbles, bytes, halves or floats
           (Q4: the low nibbles are elements 0..15, the high nibbles 16..31, as in GGUF)
   scales  one u32 per block: f16 scale in the low half, f16 minimum in the high half; absent for F16 and F32

   Both are [block][row], so that neighbouring threads (rows) read neighbouring words. #}
{% macro block_words(format) %}{{ {"F32": 8, "F16": 4, "Q8_0": 2, "Q4_0": 1, "Q4_1": 1}[format] }}{% endmacro %}
{% macro has_scales(format) %}{{ "yes" if format in ("Q8_0", "Q4_0", "Q4_1") }}{% endmacro %}

{# Elements 4*part .. 4*part+3 of a block as vec4f, before scale and minimum; `words` is an expression of array type.
   i32 -> f32 is one instruction on CPU adapters, u32 -> f32 is not: hence the signed conversions. #}
{% macro elements(format, words, part) %}
{% if format == "F32" %}bitcast<vec4f>({{ words }}[{{ part }}])
{% elif format == "F16" %}vec4f(unpack2x16float({{ words }}[{{ part // 2 }}][{{ part % 2 * 2 }}]), unpack2x16float({{ words }}[{{ part // 2 }}][{{ part % 2 * 2 + 1 }}]))
{% elif format == "Q8_0" %}vec4f(unpack4xI8({{ words }}[{{ part // 4 }}][{{ part % 4 }}]))
{% else %}vec4f(vec4i(unpack4xU8(({{ words }}[0][{{ part % 4 }}]{% if part >= 4 %} >> 4u{% endif %}) & 0x0f0f0f0fu)))
{% endif %}
{% endmacro %}
