"""Where a decode step's GPU time goes: the passes of its launches, timed one by one."""
