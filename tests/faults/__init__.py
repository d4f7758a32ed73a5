# SPDX-License-Identifier: Apache-2.0
"""What breaks jobs, done to a job: see docs/use/reliability.md. A few of each in the usual run, many by run.sh."""
