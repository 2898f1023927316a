{# How kernels see the K and V of a layer.

   slabs = 0: each is a buffer [position][kv_heads * head_dim].
   slabs > 0: a slab has the rows of K for a run of positions, then those of V. A launch that reads binds `slabs` of them
   (the last one again where there are fewer; one is read without a choice) and their table. A launch that appends binds
   one of them and the table, `slabs` being then how many may be in that. The table:
     pages[0]      (end of these slabs' chunks, the same for the other size, chunks in all, the same for the other size)
     pages[1 + s]  (first position, positions, number of its first chunk, the same for the other size); unused: all ones
   It may be longer than a kernel declares. No chunk is in two slabs.
   `column` (z or w) is where the chunks of this kernel's size are counted.

   half: a number is an f16, two of them in a u32, the first in its low bits; else an f32. Indices count the same. #}

{# How `count` numbers side by side are declared: one (of f32 only), two or four. #}
{% macro type(half, count) -%}
{{ {2: "u32", 4: "vec2u"}[count] if half else {1: "f32", 2: "vec2f", 4: "vec4f"}[count] }}
{%- endmacro %}

{# Four numbers out of what was read of an array of fours. #}
{% macro four(half, read) -%}
{{ "unpack_four(%s)" % read if half else read }}
{%- endmacro %}

{# A pair of numbers as it is stored in an array of pairs. #}
{% macro pair(half, value) -%}
{{ "pack2x16float(%s)" % value if half else value }}
{%- endmacro %}

{# The declarations, from binding `first` on: arrays of `count` numbers, of V perhaps one by one. `bound`: how many of the
   slabs this kernel binds. #}
{% macro declare(slabs, half, first, access, count, v_count, bound) %}
{% if slabs %}
@group(0) @binding({{ first }}) var<uniform> pages: array<vec4u, {{ slabs + 1 }}>;
{% for s in range(bound) %}
@group(0) @binding({{ first + 1 + s }}) var<storage, {{ access }}> slab{{ s }}: array<{{ type(half, count) }}>;
{% endfor %}
{% else %}
@group(0) @binding({{ first }}) var<storage, {{ access }}> k_cache: array<{{ type(half, count) }}>;  // [position][kv_heads * head_dim]
@group(0) @binding({{ first + 1 }}) var<storage, {{ access }}> v_cache: array<{{ type(half, count if half else v_count) }}>;
{% endif %}
{% if half and count == 4 %}
fn unpack_four(words: vec2u) -> vec4f {
  return vec4f(unpack2x16float(words.x), unpack2x16float(words.y));
}
{% endif %}
{% endmacro %}

{# chunk_of(number): what is to be done for a chunk, of those that this launch binds. Rows of K and V are position + k and position + v (which
   wrap around: a slab's first position may be large, its first row is 0). #}
{% macro chunks(slabs, column, chunk) %}
struct Chunk {
  slab: u32,   // of those bound
  begin: u32,  // positions from, to
  end: u32,
  k: u32,
  v: u32,
}

fn chunk_of(number: u32) -> Chunk {
{% if slabs %}
  var s = 0u;
{% for i in range(1, slabs) %}
  s = select(s, {{ i }}u, number >= pages[{{ i + 1 }}].{{ column }});
{% endfor %}
  let slab = pages[s + 1u];
  let begin = slab.x + (number - slab.{{ column }}) * {{ chunk }}u;
  return Chunk(s, begin, min(begin + {{ chunk }}u, slab.x + slab.y), 0u - slab.x, slab.y - slab.x);
{% else %}
  return Chunk(0u, number * {{ chunk }}u, (number + 1u) * {{ chunk }}u, 0u, 0u);
{% endif %}
}
{% endmacro %}

{# The body once for each slab it may be about, with the names of its K and V; `which` is the same for all that run it
   together. #}
{% macro choose(slabs, which) %}
{% if slabs > 1 %}
switch {{ which }} {
{% for s in range(slabs) %}
{{ "default: {" if loop.last else "case %du: {" % s }}
{{ caller("slab%d" % s, "slab%d" % s) }}
}
{% endfor %}
}
{% elif slabs %}
{{ caller("slab0", "slab0") }}
{% else %}
{{ caller("k_cache", "v_cache") }}
{% endif %}
{% endmacro %}

{# One number of V, where kernels that read one at a time declare V as such. #}
{% macro number(slabs, half, v, index) -%}
{% if half -%}
unpack2x16float({{ v }}[({{ index }}) / 4u][({{ index }}) / 2u % 2u])[({{ index }}) % 2u]
{%- else -%}
{{ "%s[(%s) / 4u][(%s) %% 4u]" % (v, index, index) if slabs else "%s[%s]" % (v, index) }}
{%- endif %}
{%- endmacro %}

{# The chunks that this launch binds, from, to; and how many there are in all. #}
{% macro first_chunk(slabs, column) -%}
{{ "pages[1].%s" % column if slabs else "0u" }}
{%- endmacro %}
{% macro end_chunk(slabs, column, chunk) -%}
{{ "pages[0].%s" % {"z": "x", "w": "y"}[column] if slabs else chunk_count(slabs, column, chunk) }}
{%- endmacro %}
{% macro chunk_count(slabs, column, chunk) -%}
{{ "pages[0].%s" % column if slabs else "(step.length + %du) / %du" % (chunk - 1, chunk) }}
{%- endmacro %}

{# rows_of(position): the rows of K and V that the step's position is appended at. #}
{% macro rows(slabs) %}
fn rows_of(position: u32) -> vec2u {
{% if slabs %}
  var slab = pages[1];
{% for i in range(1, slabs) %}
  slab = select(slab, pages[{{ i + 1 }}], position >= pages[{{ i + 1 }}].x);
{% endfor %}
  return vec2u(position - slab.x, position - slab.x + slab.y);
{% else %}
  return vec2u(position);
{% endif %}
}
{% endmacro %}
{% macro k(slabs) %}{{ "slab0" if slabs else "k_cache" }}{% endmacro %}
{% macro v(slabs) %}{{ "slab0" if slabs else "v_cache" }}{% endmacro %}

{# `shares`: among how many workgroups the chunks are shared out, MOST at most: as few as leave the longest share as
   short as it can be, since someone has to put them together. #}
{% macro shares(slabs, column, chunk, most) %}
let all_chunks = {{ chunk_count(slabs, column, chunk) }};
let of_a_share = (all_chunks + {{ most - 1 }}u) / {{ most }}u;
let shares = (all_chunks + of_a_share - 1u) / of_a_share;
{% endmacro %}
