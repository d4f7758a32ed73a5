# SPDX-License-Identifier: Apache-2.0
"""Generation: a trained model answers prompts, on any grid, with its keys and values dealt over the ranks.

From the command line down: flags and checkpoint to a model (program.py, start.py), prompts in and answers out
(prompts.py), batch by batch and token by token (generate.py), one pass over the grid (decoder.py), one token chosen
(sampling.py). The cached attention itself is the heart's: context_parallel/attention/cache.py.
"""
