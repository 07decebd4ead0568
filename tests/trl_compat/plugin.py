"""A plugin of pytest for a run of TRL's own tests: `trl` means ours, and no test asks the Hub for anything.

HF_HUB_OFFLINE=1 HF_HUB_CACHE=FOLDER python -m pytest -p trl_compat.plugin FOLDER_OF_THE_TESTS
"""

import huggingface_hub
from transformers.utils import import_utils

from operant.compat.trl import as_trl

as_trl()
huggingface_hub.HfApi.delete_repo = lambda *args, **kwargs: None  # they delete what an earlier run may have pushed
import_utils._peft_available = True  # one file keeps and hides this name, which transformers 5 has no more
