"""Losses and layers over embedding tables, as functions that look up rows by id.

bags      `embedding_bag`: sums or means of the rows in each bag
sampled   noise-contrastive estimation, and samplers of noise classes
tree      hierarchical softmax over a complete binary tree, over Huffman's tree, or along paths that
          the batch contains
"""

from dtrans.nn.bags import embedding_bag as embedding_bag
from dtrans.nn.sampled import (
    Sampler as Sampler,
    custom_sampler as custom_sampler,
    log_uniform_sampler as log_uniform_sampler,
    nce_loss as nce_loss,
    uniform_sampler as uniform_sampler,
)
from dtrans.nn.tree import (
    ClassTree as ClassTree,
    complete_tree as complete_tree,
    custom_hierarchical_sigmoid as custom_hierarchical_sigmoid,
    hierarchical_sigmoid as hierarchical_sigmoid,
    huffman_tree as huffman_tree,
)
