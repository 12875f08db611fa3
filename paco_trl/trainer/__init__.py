# SPDX-License-Identifier: Apache-2.0
"""The trainers, their settings, and the formulas they are made of."""
