"""Problems with an answer that can be checked: generated ones, published files, and the sets of reasoning-gym."""
