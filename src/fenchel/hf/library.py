"""Everything taken from transformers, in one place: what is missing is said at once."""

from __future__ import annotations

from typing import Any

try:
    import transformers
    from transformers import cache_utils as _cache_utils
    from transformers import masking_utils as _masking_utils
    from transformers.pytorch_utils import Conv1D as _Conv1D
    from transformers.utils import output_capturing
    from transformers.utils.import_utils import is_tracing as _is_tracing
except ImportError as problem:
    raise ImportError(
        f"fenchel.hf needs transformers >= 5.16 ({problem}); install it, in a clone of fenchel, "
        'with: pip install -c constraints.txt ".[hf]"'
    ) from problem

VERSION: str = transformers.__version__
AttentionInterface: Any = transformers.AttentionInterface
AttentionMaskInterface: Any = transformers.AttentionMaskInterface
attention_functions: Any = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
PreTrainedModel: Any = transformers.PreTrainedModel
PreTrainedConfig: Any = transformers.PreTrainedConfig
GenerationMixin: Any = transformers.GenerationMixin
DynamicCache: Any = _cache_utils.DynamicCache
DynamicLayer: Any = _cache_utils.DynamicLayer
Conv1D: Any = _Conv1D
masking_utils: Any = _masking_utils
is_tracing: Any = _is_tracing

# GPT-2 and its kin record attention weights without telling the attention function; only here is
# known what is being recorded.
active_collector: Any = output_capturing._active_collector
