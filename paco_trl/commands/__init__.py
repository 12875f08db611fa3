# SPDX-License-Identifier: Apache-2.0
"""Commands of the console script `paco-trl`."""
