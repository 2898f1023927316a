{# The shares of attention (attention_decode.wgsl), put together by the product that reads them: eight values of x at a
   time, four shares at a time. Where rows are small, TEAMS threads do so for the same eight values, each for other
   shares, and meet in workgroup memory.

   FUNCTIONS(teams, octets) goes to module scope; the kernel has `x` (the sums, [share][K4 vectors]), `normals` and, of this
   step, `shares`. READ names four shares from c on, of octet i: NAMEn, NAMEx0, NAMEx1; what there is not has the weight 0.
   MERGED declares what all come to, from the first four, which are there already: collective where there are teams. #}
{% macro functions(teams, octets) %}
struct Merged {
  top: f32,
  sum: f32,
  e0: vec4f,
  e1: vec4f,
}
{% if teams > 1 %}
var<workgroup> of_teams: array<Merged, {{ (teams - 1) * octets }}>;

fn join(a: Merged, b: Merged) -> Merged {
  let top = max(a.top, b.top);
  let of_a = exp(a.top - top);
  let of_b = exp(b.top - top);
  return Merged(top, a.sum * of_a + b.sum * of_b, a.e0 * of_a + b.e0 * of_b, a.e1 * of_a + b.e1 * of_b);
}
{% endif %}

// Takes in four more shares of eight values of x. Those that there are not have the weight 0.
fn merge(before: Merged, n: array<vec2f, 4>, x0: array<vec4f, 4>, x1: array<vec4f, 4>) -> Merged {
  let top = max(max(before.top, max(n[0].x, n[1].x)), max(n[2].x, n[3].x));
  let kept = exp(before.top - top);
  let part = vec4f({% for u in range(4) %}exp(n[{{ u }}].x - top){{ ", " if not loop.last }}{% endfor %});
  return Merged(
    top,
    before.sum * kept + {% for u in range(4) %}n[{{ u }}].y * part[{{ u }}]{{ " + " if not loop.last }}{% endfor %},
    before.e0 * kept + {% for u in range(4) %}x0[{{ u }}] * part[{{ u }}]{{ " + " if not loop.last }}{% endfor %},
    before.e1 * kept + {% for u in range(4) %}x1[{{ u }}] * part[{{ u }}]{{ " + " if not loop.last }}{% endfor %},
  );
}
{% endmacro %}

{% macro read(i, c, name, heads, head_dim) %}
let {{ name }}n = array(
{% for u in range(4) %}
  select(vec2f(-1e30, 0.0), normals[min({{ c }} + {{ u }}u, shares - 1u) * {{ heads }}u + {{ i }} / {{ head_dim // 8 }}u], {{ c }} + {{ u }}u < shares),
{% endfor %}
);
{% for half in range(2) %}
let {{ name }}x{{ half }} = array({% for u in range(4) %}x[min({{ c }} + {{ u }}u, shares - 1u) * K4 + 2u * {{ i }} + {{ half }}u]{{ ", " if not loop.last }}{% endfor %});
{% endfor %}
{% endmacro %}

{% macro merged(merged, i, first, teams, octets, heads, head_dim) %}
  var {{ merged }} = merge(Merged(-1e30, 0.0, vec4f(0.0), vec4f(0.0)), {{ first }}n, {{ first }}x0, {{ first }}x1);
{# two reads of four under way where a thread has registers for them #}
{% set reads = 2 if teams > 1 else 1 %}
  for (var share = {{ "4u * team + %du" % (4 * teams) if teams > 1 else "4u" }}; share < shares; share += {{ 4 * teams * reads }}u) {
{% for r in range(reads) %}
    {{ read(i, "share + %du" % (4 * teams * r) if r else "share", "more%d_" % r, heads, head_dim) | trim | indent(2) }}
{% endfor %}
{% for r in range(reads) %}
    {{ merged }} = merge({{ merged }}, more{{ r }}_n, more{{ r }}_x0, more{{ r }}_x1);
{% endfor %}
  }
{% if teams > 1 %}
  if (shares > 4u) {  // the other teams had something to do
    if (team > 0u && team < {{ teams }}u) { of_teams[thread - {{ octets }}u] = {{ merged }}; }
    workgroupBarrier();
    if (team == 0u) {
{% for t in range(teams - 1) %}
      {{ merged }} = join({{ merged }}, of_teams[thread + {{ t * octets }}u]);
{% endfor %}
    }
  }
{% endif %}
{% endmacro %}
