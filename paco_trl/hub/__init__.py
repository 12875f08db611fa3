# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face Hub: what is checked before a run, what is uploaded beside it, and licences."""
