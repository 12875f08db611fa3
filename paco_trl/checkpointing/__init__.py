# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: gathered and averaged weights, complete files, formats that users load."""
