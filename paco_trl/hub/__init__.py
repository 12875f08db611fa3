# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face Hub: checks before a run, uploads during it, and licenses."""
