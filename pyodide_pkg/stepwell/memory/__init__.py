"""The buffer pool: it owns every GPU buffer; a policy decides, the pool acts and keeps the books.

``pool.py`` has ``BufferPool`` and its leases, ``buffer.py`` what it hands out, ``inventory.py`` the buffers that
exist and their states, ``ledger.py`` the books, ``supply.py`` the policies by role and what the budget
(``budget.py``) allows, ``turn.py`` whose step it is, ``recovery.py`` what happens when memory or the device is gone.
``debug.py`` poisons and quarantines, ``events.py`` and ``snapshot.py`` tell viewers, ``explain.py`` tells people.

A buffer is LIVE, then FREE_RECORDED until the flush, FREE_SUBMITTED until the GPU is done, FREE_COMPLETE, DESTROYED.
Before the flush it serves only commands of the same session; what the CPU writes, another session, or a lease that is
to be cleared gets another buffer, whatever the policy says.

The chosen policy (``policies/``: one file and one row each; docs/add-a-policy.md) serves KV, ACTIVATION and
WORKSPACE.  Weights are exact and never reused (``lazy_release``), uniforms use ``simple``, staging ``disabled``, as
in ONNX Runtime.  A buffer's WebGPU usage follows from its role.
"""
