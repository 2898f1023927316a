{# Sums over a workgroup, for kernels that may know the adapter's subgroups. `subgroup` is their size, 0: unknown.
   DECLARE(threads, subgroup) goes to module scope, PARAMETERS to the entry point's; THREAD is then the invocation's number,
   linear in the subgroups. With subgroups their sums meet in `reduced`, one each; without, TOTAL_OF_ALL is collective:
   every invocation calls it, once, and all have the result. #}
{% macro declare(threads, subgroup) %}
var<workgroup> reduced: array<f32, {{ threads // subgroup if subgroup else threads }}>;
{% if not subgroup %}

fn total_of_all(value: f32, thread: u32) -> f32 {
  reduced[thread] = value;
  workgroupBarrier();
  for (var half = {{ threads }}u; half > 1u; ) {
    let rest = (half + 1u) / 2u;
    if (thread + rest < half) { reduced[thread] += reduced[thread + rest]; }
    half = rest;
    workgroupBarrier();
  }
  return reduced[0];
}
{% endif %}
{% endmacro %}

{% macro enable(subgroup) %}
{% if subgroup %}
enable subgroups;
{% endif %}
{% endmacro %}

{# The subgroup's own numbers: how invocations are dealt out to subgroups is the adapter's business. #}
{% macro parameters(subgroup) -%}
{%- if subgroup -%}
@builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32
{%- else -%}
@builtin(local_invocation_index) lane: u32
{%- endif -%}
{%- endmacro %}
{% macro thread(subgroup) -%}
{{ "subgroup * %du + lane" % subgroup if subgroup else "lane" }}
{%- endmacro %}
