"""Sessions that decode a sequence token by token, and the modes of its KV cache.

``session.py`` has ``DecodeSession``: prefill, then tokens, while later steps are on their way (``stepper.py`` issues
one step, ``flight.py`` is one that was issued).  A step is a transaction that commits once its result is back.
``generation.py`` is what can be asked for and where a token's costs are summed, ``timing.py`` what they are,
``sampling.py`` the host's choice, ``preparation.py`` which kernels will be needed.  ``kv_pattern.py`` has the
workloads.

*Where a token is chosen.* On the GPU, which reads back 4 bytes, or, where ``top_logits`` are asked for, by the host
out of all logits: the same ids from the same logits and seed.

*Several sessions* over one model share its weights, the launcher's kernels and the pool; each has a KV cache, small
buffers and plans of its own, and their tokens may come in turns or at once.  Their steps go to the GPU one after
another, not as a batch, each within ``pool.step(session)``; whoever else submits on the pool waits for its turn, too.
Between two awaits only one session is at work, so a token's counters are sums over such stretches: all of them add up
to the launcher's and the ledger's.  ``ms`` is the time since that session's token before, whoever worked in between;
the GPU's time is taken for one generation at a time (``exclusion.py``).  A session keeps about one bind group per
launch: from eight sessions on the launch option ``bind_groups`` should be larger than its default.

*The context's end.* A prompt that does not fit is an error (``ContextFull``) that changes nothing, in every mode.  An
answer that reaches the end is finished there: the last token needs no position, so there are ``context - prompt + 1``
at most.  A prompt is read in steps of 64 tokens, on GPUs of up to 256: as many as leave attention's partial results
of that length at 128 MiB.  A cancel takes effect after each.

*KV modes* (``kv_modes.py`` is the table; ``kv_cache.py``, ``paged_kv.py``): ``cache.extend(rows, prompt_end)`` gives
each layer's K and V, then ``commit()`` or ``abandon()``.  ``cache.key`` names the buffers for plans.  K and V are f32
or f16: half of all KV bytes, 11 bits of precision, and a value beyond 65,504 does not fit (WGSL leaves open what is
stored; usually infinity, and then the logits are NaN).

*Paged.* Pages of 16 positions come in slabs, runs of pages in one buffer per layer (K's rows, then V's), because WGSL
cannot choose a buffer by number.  A prompt has one slab; then up to 9 % more than needed is reserved (short sequences
double, up to what suits 1,000 positions), so the number of slabs grows with the logarithm of the length.  The page
table, shared by all layers, is a uniform buffer per group of slabs that one launch reads: one slab on CPU adapters,
the limit of storage buffers less three on GPUs, but 12 at most.  A launch binds as many as its group has, rounded up
to a power of two: the kernel has its loads once for each, and for one no choice at all.  A chunk of attention is in
one slab; a step appends to one.
"""
