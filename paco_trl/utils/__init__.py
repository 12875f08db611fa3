# SPDX-License-Identifier: Apache-2.0
"""Helpers that all packages share, such as files, locks, names, processes, texts, and checks of options."""
