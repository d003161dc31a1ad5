"""`python -m services.prefill`: a bare prefill worker, without Ray."""

import sys

from pdserve.runtime.process import run_process
from pdserve.runtime.worker import run_worker
from services.prefill.worker import PrefillWorker

if __name__ == "__main__":
    sys.exit(run_process("prefill", lambda settings, stop: run_worker(PrefillWorker(settings), stop)))
