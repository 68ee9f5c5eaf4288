"""What makes XLA compile a tiny program sooner: not to use its emitters of fusions, while it still
has a choice.
"""

import jax

OPTIONS = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
FLAGS = [f"--{name}={str(value).lower()}" for name, value in OPTIONS.items()]
