"""Python imports this as it begins, in each process that tests start (`conftest.py`). To look for garbage among all
that PyTorch imports, again and again and once more at the end, takes a fifth of a short process's time.
"""

import atexit
import gc

gc.set_threshold(50_000, 20, 50)
atexit.register(gc.freeze)
