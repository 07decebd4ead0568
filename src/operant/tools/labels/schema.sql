CREATE TABLE items (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, content TEXT NOT NULL, sources TEXT NOT NULL,
  gold TEXT, added REAL NOT NULL, closed REAL);
CREATE TABLE labels (number INTEGER PRIMARY KEY AUTOINCREMENT, item INTEGER NOT NULL REFERENCES items,
  labeller TEXT NOT NULL, action TEXT NOT NULL CHECK (action IN ('label', 'skip', 'undo')), answer TEXT,
  undoes INTEGER REFERENCES labels, seconds REAL, time REAL NOT NULL, key TEXT NOT NULL UNIQUE);
CREATE INDEX labels_of_item ON labels (item, labeller, number);
CREATE TABLE shown (item INTEGER NOT NULL, labeller TEXT NOT NULL, time REAL NOT NULL, PRIMARY KEY (item, labeller))
  WITHOUT ROWID;
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE VIEW current AS SELECT * FROM labels WHERE action != 'undo' AND number IN
  (SELECT max(number) FROM labels GROUP BY item, labeller);
