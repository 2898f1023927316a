"""A workload of growing tensors: no model, no prompt."""

from dataclasses import replace

from stepwell.decode.kv_pattern import FIRST_POSITIONS, KVPattern
from stepwell.decode.timing import TokenEvent
from stepwell.gpu.clock import now_ms
from stepwell.page.record import RunRecord
from stepwell.page.run import PageRun


class WorkloadRun(PageRun):
    """The workload of the request."""

    async def _play(self) -> RunRecord:
        request, launcher = self._request, self._launcher
        name = request.workload or ""
        start = FIRST_POSITIONS if request.start is None else request.start
        self._start_afresh()
        pattern = KVPattern(name, launcher, kv=request.kv, start=start, tokens=request.tokens)
        asked = {**request.as_dict(), "start": start, "context": pattern.capacity}
        record = RunRecord(
            scenario={"model": name, "sha256": None, **asked},
            environment=self._environment,
            prompt_ids=[],
            before=launcher.report(),
        )
        with self._playing(pattern):
            self._outbox.enter("kernels", "Compiling kernels")
            await pattern.prepare(self._outbox.progress("kernels"))
            await launcher.device.take_profile()
            self._outbox.enter("prefill", f"Filling {start:,} positions")
            async for event in pattern.run():
                if event.index == 0:
                    self._outbox.enter("decode", "Growing")
                self._token(record, await self._profiled(event), "")
            record.finish_reason = "cancelled" if pattern.cancelled else "length"
            await self._sum_up(record)
        return record

    async def _profiled(self, event: TokenEvent) -> TokenEvent:
        """A token with its GPU time and its spans, as a session gives them."""
        spans = self._spans
        if spans is not None:
            start, timing = now_ms() - event.timing.ms, event.timing
            spans.add("python", "record and submit", start, start + timing.encode_ms)
            spans.add("python", "wait", start + timing.encode_ms, start + timing.encode_ms + timing.wait_ms)
        if not self._request.gpu_time or event.counters is None:
            return event
        profile = await self._launcher.device.take_profile()
        if spans is not None:
            spans.add_profile(profile)
        return replace(event, counters=replace(event.counters, gpu_ms=sum(profile.passes_us) / 1000))
