# SPDX-License-Identifier: Apache-2.0
"""Pictures of a run: curves, contact sheets, and how a judge does."""
