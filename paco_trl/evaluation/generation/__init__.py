# SPDX-License-Identifier: Apache-2.0
"""Evaluation of image models. Its names are those of `paco_trl.evaluation`."""
