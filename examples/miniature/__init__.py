# SPDX-License-Identifier: Apache-2.0
"""The full method on toy models of the real classes, in a planted world whose truth is known."""
