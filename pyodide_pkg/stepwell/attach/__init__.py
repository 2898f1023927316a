"""The pool under another WebGPU runtime: shims and the policies by name in JavaScript (``js/``).

``bundle.py`` joins the ES modules of ``js/`` into one classic script that sets ``globalThis.stepwell``.  Which
destroyed buffers are kept is decided by a keeper: ``js/keeper.js`` for a policy by name, ``keeper.py`` for a policy
object of the caller's, which ``attachment.py`` gives to the JavaScript pool.  The two are held equal, call by call,
by ``tests/simulation/attach/test_attach_keepers.py``.  In ``js/``:

* ``natives.js`` captures WebGPU's methods, ``shims.js`` puts layers around them and takes them away again,
  ``intercept.js`` is the layer that pools, ``alias.js`` what an application gets in place of a native buffer;
* ``pool.js`` is the pool of one device: ``proof.js`` proves that new buffers are valid before one is kept,
  ``uses.js`` knows what each encoder uses, ``zero.js`` clears before the commands that see it, ``tombstones.js``
  makes the browser refuse what uses a destroyed alias, ``idle.js`` gives memory back when nothing is submitted;
* ``recorder.js`` watches what the runtime asks for: ``boundaries.js`` infers where a token ends, ``event_log.js``
  keeps the events, ``recording.js`` counts, ``trace_text.js`` writes a trace for ``stepwell.replay``, ``summary.js``
  and ``reuse.js`` say what could be reused, ``costs.js`` times what a create costs;
* ``attach.js`` wires these; ``caretaker.js`` serves aliases that outlive their attachment.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stepwell.errors import NoWebGPU
from stepwell.memory.policies.base import Policy
from stepwell.options import OptionValue

if TYPE_CHECKING:
    from stepwell.attach.attachment import Attachment


def attach(
    target: Any = None,
    *,
    record: bool = False,
    policy: str | Callable[[], Policy] | None = None,
    budget: int | None = None,
    zero: str = "always",
    runtime: str = "",
    limit: int | None = None,
    **options: OptionValue,
) -> "Attachment":
    """Put the pool under the WebGPU runtimes of this page or worker, or record what they do, or both.

    ``target``: a ``GPUDevice``, else every device of the realm that Pyodide runs in, from now on.  ``policy``: the name
    of an ``attached`` row of ``POLICIES``, with its ``options``, or a callable that makes a Policy object; by default
    ``adaptive``, or no pool when ``record`` is on.  ``budget``: bytes that each device's pool may reserve.  ``zero``:
    whether buffers are cleared before they serve again, ``always`` or, if the runtime reads nothing that it has not
    written, ``never``.  ``runtime``: a name for the recording; ``limit``: how many events it keeps.

    BadRequest for a choice that is not allowed, and when something is attached already; NoWebGPU outside of a browser.
    """
    try:
        from stepwell.attach.attachment import Attachment
    except ImportError:
        raise NoWebGPU("No browser here: attach() needs Pyodide. Without it, load stepwell-attach.js.") from None
    return Attachment(
        target, record=record, policy=policy, budget=budget, zero=zero, runtime=runtime, limit=limit, options=options
    )
