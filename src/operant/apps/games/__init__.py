"""Text games: TextWorld and Jericho, rooms, and the worlds of Gymnasium."""
