WITH mine AS (SELECT item FROM current WHERE labeller = :name),
 busy AS (SELECT item, labeller FROM current WHERE action = 'label' AND labeller NOT IN (:name, 'import')
   UNION SELECT s.item, s.labeller FROM shown s WHERE s.labeller != :name AND s.time > :since AND NOT EXISTS
   (SELECT 1 FROM labels l WHERE l.item = s.item AND l.labeller = s.labeller AND l.time >= s.time)),
 free AS (SELECT number FROM items WHERE gold IS NULL AND closed IS NULL AND number NOT IN (SELECT item FROM mine)
   AND number NOT IN (SELECT item FROM busy GROUP BY item HAVING count(*) >= :overlap))
