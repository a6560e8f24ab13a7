"""`python -m cann_llm_quant`: the same as the `cann-llm-quant` command."""

import sys

from cann_llm_quant.cli.main import main

sys.exit(main())
