"""XLA options that compile tiny programs faster: no fusion emitters, where XLA has the option."""

import jax

OPTIONS = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
FLAGS = [f"--{name}={str(value).lower()}" for name, value in OPTIONS.items()]
