"""Every architecture of the installed transformers with "tile_attention": `python -m architectures`."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # some configurations would look for weights
