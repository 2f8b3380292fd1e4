"""Where the work of one worker runs, where it keeps messages, and who notes what it does. Decides nothing."""

from __future__ import annotations

from typing import NamedTuple

from pipecomp.runtime.channel import CodecThreads
from pipecomp.runtime.compute import ComputeThread
from pipecomp.runtime.stores import StoreHome
from pipecomp.runtime.trace import DEAF, Recorder


class Engine(NamedTuple):
    """What every part of one worker's pipeline shares."""

    compute: ComputeThread
    threads: CodecThreads
    home: StoreHome = StoreHome()
    recorder: Recorder = DEAF
