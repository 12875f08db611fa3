# SPDX-License-Identifier: Apache-2.0
"""Plot the curves of a run, its contact sheets, and the errors of a judge."""
