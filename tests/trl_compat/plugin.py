"""A plugin of pytest for a run of TRL's own tests: `trl` means ours, and no test asks the Hub for anything.

HF_HUB_OFFLINE=1 HF_HUB_CACHE=FOLDER python -m pytest -p trl_compat.plugin FOLDER_OF_THE_TESTS
"""

import huggingface_hub

from operant.compat.trl import as_trl

as_trl()
huggingface_hub.HfApi.delete_repo = lambda *args, **kwargs: None  # they delete what an earlier run may have pushed
