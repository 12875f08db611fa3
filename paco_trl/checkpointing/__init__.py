# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: weights gathered and averaged, files that are complete or not there, formats that users load."""
