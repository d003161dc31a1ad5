"""`python -m services.decode`: a bare decode worker, without Ray."""

import sys

from pdserve.runtime.process import run_process
from pdserve.runtime.worker import run_worker
from services.decode.worker import DecodeWorker

if __name__ == "__main__":
    sys.exit(run_process("decode", lambda settings, stop: run_worker(DecodeWorker(settings), stop)))
