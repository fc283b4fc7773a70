CREATE TABLE users (id INTEGER PRIMARY KEY, address TEXT);
INSERT INTO users VALUES (1, 'ada@example.com'), (2, 'grace@example.com'), (3, 'ada@example.com'),
  (4, 'edsger@example.com'), (5, 'grace@example.com');
