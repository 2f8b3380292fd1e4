"""Where the work of one worker runs, and where it keeps messages. Knows threads and a folder; decides nothing."""

from __future__ import annotations

from typing import NamedTuple

from pipecomp.runtime.channel import CodecThreads
from pipecomp.runtime.compute import ComputeThread
from pipecomp.runtime.stores import StoreHome


class Engine(NamedTuple):
    """What every part of one worker's pipeline shares."""

    compute: ComputeThread
    threads: CodecThreads
    home: StoreHome = StoreHome()
