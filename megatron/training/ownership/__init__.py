# SPDX-License-Identifier: Apache-2.0
"""Which job may write at a path, and which files it may remove.

- lock_file.py: of all jobs with the same target, at most one has it
- atomic.py: files and folders that are complete when they get their names
- own_files.py: locks of any file or folder, names of unfinished files, and the removal of listed files
"""
