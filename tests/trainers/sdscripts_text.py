"""Encodes captions by sd-scripts' own strategies: `python sdscripts_text.py JOB.json`.

The job names the strategies' module and classes, folders of networks, and a folder of tokenizers by
the names that sd-scripts gives them. Each caption's arrays go to `{folder}/{number}.npz`.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path[0] = os.getcwd()
import transformers  # noqa: E402

# A name that version 5 has no longer, which is imported and not used.
sys.modules["transformers"].CLIPFeatureExtractor = transformers.CLIPImageProcessor
job = json.loads(Path(sys.argv[1]).read_bytes())
module = importlib.import_module(f"library.strategy_{job['module']}")
name = job["module"].capitalize()
tokenize = getattr(module, f"{name}TokenizeStrategy")(
    job["length"], tokenizer_cache_dir=job["tokenizers"]
)
encoding = getattr(module, f"{name}TextEncodingStrategy")()
caching = getattr(module, f"{name}TextEncoderOutputsCachingStrategy")(True, 1, True, False)
networks = [
    getattr(transformers, kind).from_pretrained(folder).eval() for kind, folder in job["networks"]
]
for number, caption in enumerate(job["captions"]):
    place = str(Path(job["folder"], f"{number}.npz"))
    info = SimpleNamespace(caption=caption, text_encoder_outputs_npz=place)
    caching.cache_batch_outputs(tokenize, networks, encoding, [info])
